"""The device that the tests of engine and learner compute on: `AGL_TEST_DEVICE`, such as cuda; the CPU without it."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("AGL_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

LARGE_BFLOAT16 = [pytest.mark.night] if DEVICE.type == "cpu" and not torch.cpu._is_avx512_bf16_supported() else []
"""Marks of tests that compute in bfloat16 with more than ten million parameters, which takes minutes on a CPU without
instructions for it."""
