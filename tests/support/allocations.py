"""What a computation allocates: the peak in bytes, and the shapes of all tensors that it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(compute: Callable[[], object], device: torch.device) -> int:
    """The most bytes that torch's allocator holds for `compute`, beyond those from before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        compute()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        compute()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, live)
    return peak


class LargestTensor(TorchDispatchMode):
    """Inside of it, every tensor that an operation returns is seen, those of the backward pass included.

    Attributes:
        elements: of the largest tensor with an axis of `vocabulary`, but for the weights' own [vocabulary, hidden].
    """

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self._vocabulary, self._weight = vocabulary, {vocabulary, hidden}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            shape = set(tensor.shape) if isinstance(tensor, torch.Tensor) else set()
            if self._vocabulary in shape and shape - {1} != self._weight:
                self.elements = max(self.elements, tensor.numel())
        return out
