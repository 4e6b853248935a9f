"""Makes torch.distributed accept the CPU where verl requests an accelerator."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import fsdp


def install() -> None:
    """Replace what verl is about to import, in this process."""
    dist.init_process_group = _without_repeated_backends(dist.init_process_group)
    fsdp.CPUOffloadPolicy = UnpinnedOffload


class UnpinnedOffload(fsdp.CPUOffloadPolicy):
    """The offload policy of verl's reference model without pinned memory, which needs an accelerator."""

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(pin_memory=False)


def _without_repeated_backends(init_process_group: Any) -> Any:
    """verl asks for `cpu:gloo,<device>:<backend>`, which names the CPU twice here; torch refuses that."""

    @wraps(init_process_group)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if backend is not None:
            backend = ",".join(dict.fromkeys(backend.split(",")))
        return init_process_group(backend, *args, **kwargs)

    return init
