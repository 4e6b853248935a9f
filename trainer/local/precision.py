"""Where float64 is computed: Apple's GPUs have none, so it is on the CPU there."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """`values` in float64: on their device, or on the CPU if that is an Apple GPU."""
    return (values.cpu() if values.device.type == "mps" else values).to(torch.float64)
