"""The device that the tests of engine and learner compute on: `AGL_TEST_DEVICE`, such as cuda; the CPU without it."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("AGL_TEST_DEVICE", "cpu"))

multiplies_bfloat16 = pytest.mark.skipif(
    DEVICE.type == "cpu" and not torch.cpu._is_avx512_bf16_supported(),
    reason="without instructions for bfloat16 this takes minutes",
)
"""Of tests that compute in bfloat16 with a model of more than ten million parameters."""
