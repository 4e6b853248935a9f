"""The CPU in the shape of an accelerator's torch module (`torch.cuda`'s): one device, without separate memory."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch.cpu import Event, Stream, current_stream, stream, synchronize

__all__ = ["Event", "Stream", "current_stream", "stream", "synchronize"]


def is_available() -> bool:
    return True


def device_count() -> int:
    """1: every rank is a process that sees the whole CPU."""
    return 1


def current_device() -> torch.device:
    """A device rather than an index: verl calls `.to(current_device())`, where an index would mean CUDA."""
    return torch.device("cpu")


def set_device(device: Any) -> None:
    """No effect: there is one device."""


def get_device_name(device: Any = None) -> str:
    return "cpu"


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def empty_cache() -> None:
    """The CPU's allocator keeps no cache."""


def ipc_collect() -> None:
    """Weights travel through shared memory, which its owner unlinks."""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(available, total) bytes of the machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_allocated(device: Any = None) -> int:
    """0: nothing is allocated on an accelerator."""
    return 0


memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """No effect: there are none."""
