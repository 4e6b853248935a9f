"""0.3's small helpers: ids, what the machine has to do, and the events that end a runner."""

from __future__ import annotations

import multiprocessing
import os
import platform
import secrets
import socket
import threading
import time
from typing import Any, Protocol

__all__ = ["ExecutionEvent", "MultiprocessingEvent", "ThreadingEvent", "generate_id", "system_snapshot"]


def generate_id(length: int) -> str:
    """A random id of so many hex digits."""
    return secrets.token_hex((length + 1) // 2)[:length]


def system_snapshot(include_gpu: bool = False) -> dict[str, Any]:
    """The machine's name, system, processors and load, and its GPUs' names where torch is installed."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else (0.0, 0.0, 0.0)
    facts: dict[str, Any] = {
        "timestamp": time.time(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "load_average": list(load),
    }
    if include_gpu:
        try:
            import torch

            names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        except ImportError:
            names = []
        facts["gpus"] = [{"gpu": name} for name in names]
    return facts


class ExecutionEvent(Protocol):
    """What tells a runner's `iter` to end."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class ThreadingEvent(threading.Event):
    """An event for threads of one process."""


class MultiprocessingEvent:
    """An event for processes; it is handed to them when they start."""

    def __init__(self, *, ctx: Any = None) -> None:
        event = (ctx or multiprocessing).Event()
        self.set = event.set
        self.clear = event.clear
        self.is_set = event.is_set
        self.wait = event.wait
