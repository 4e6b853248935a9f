"""The device that the tests of engine and learner compute on: `AGL_TEST_DEVICE`, such as cuda; the CPU without it."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("AGL_TEST_DEVICE", "cpu"))
