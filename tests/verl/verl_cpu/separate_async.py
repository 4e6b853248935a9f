"""Support for verl's `separate_async` mode on CPU: weights over gloo, and saved policies that are copies.

verl imports it as `rollout.checkpoint_engine.custom_backend_module`, in trainer and rollout ranks.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any

import ray
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils import fsdp_utils

from verl_cpu.settings import CHECKPOINT_BACKEND

_TIMEOUT = timedelta(minutes=5)
_END = b""

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the first trainer rank listens."""

    host: str
    port: int


@CheckpointEngineRegistry.register(CHECKPOINT_BACKEND)  # pyright: ignore[reportAttributeAccessIssue]
class GlooCheckpointEngine(CheckpointEngine):
    """One broadcast per tensor from the first trainer rank to all rollout ranks.

    Args:
        bucket_size: bytes; not used, since each tensor is sent whole.
        is_master: whether this is the first trainer rank.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._updates = 0

    def prepare(self) -> Any:
        """The endpoint, on the first trainer rank; None on every other."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        if self._store is None:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return Endpoint(host, self._store.port)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The first trainer rank is rank 0 and rollout ranks follow; the other trainer ranks, -1, are not members."""
        members = 1 + rollout_world_size
        actor = [0] + [-1] * (actor_wg_world_size - 1)
        rollout = list(range(1, members))
        return _arguments(actor, members, metadata[0]), _arguments(rollout, members, metadata[0])

    def init_process_group(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, rank: int, world_size: int, endpoint: Endpoint
    ) -> None:
        """Join the group of this update."""
        self._updates += 1
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=_TIMEOUT)
        store = PrefixStore(f"weights/{self._updates}", self._store)
        self._group = ProcessGroupGloo(store, rank, world_size, _TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = None

    @torch.no_grad()
    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Broadcast all weights. A trainer rank that is no member iterates too: gathering a weight takes every rank."""
        await asyncio.to_thread(self._send, weights)

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Yield (name, tensor on the CPU) as they arrive."""
        received = self._receive()
        while (item := await asyncio.to_thread(next, received, None)) is not None:
            yield item

    def _send(self, weights: Weights) -> None:
        for name, weight in weights:
            if self._group is not None:
                self._broadcast_bytes(pickle.dumps((name, weight.shape, weight.dtype)))
                self._broadcast(weight.detach().contiguous())
        if self._group is not None:
            self._broadcast_bytes(_END)

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        while header := self._broadcast_bytes(None):
            name, shape, dtype = pickle.loads(header)
            weight = torch.empty(shape, dtype=dtype)
            self._broadcast(weight)
            yield name, weight

    def _broadcast_bytes(self, content: bytes | None) -> bytes:
        """Rank 0's `content`; None elsewhere."""
        length = torch.tensor([0 if content is None else len(content)])
        self._broadcast(length)
        if not length.item():
            return _END
        data = torch.empty(int(length), dtype=torch.uint8) if content is None else torch.tensor(list(content)).byte()
        self._broadcast(data)
        return data.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        assert self._group is not None
        self._group.broadcast([tensor.view(-1)]).wait()  # pyright: ignore[reportAttributeAccessIssue]


def _copied(save: Any) -> Any:
    """`Tensor.cpu()` is no copy on CPU: what verl saves as the old policy would change with every update."""

    @wraps(save)
    def save_copies(model: torch.nn.Module) -> Any:
        shards, spec = save(model)
        return {name: (shard.clone(), shard_spec) for name, (shard, shard_spec) in shards.items()}, spec

    return save_copies


fsdp_utils.fsdp2_sharded_save_to_cpu = _copied(fsdp_utils.fsdp2_sharded_save_to_cpu)


def _arguments(ranks: list[int], members: int, endpoint: Endpoint) -> dict[str, list[Any]]:
    """Arguments of `init_process_group`, one of each per worker."""
    return {"rank": ranks, "world_size": [members] * len(ranks), "endpoint": [endpoint] * len(ranks)}
