"""The processes that share an update: each computes some of its micro-batches, and all take the same optimiser step.

Invariant: what the processes learn from each other here is the same in all of them, to the bit. So are their decisions,
and their weights stay equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")

EVEN = 1.05
"""The largest share of the work may be this many times the mean."""
DIVISIONS = 6
"""How often micro-batches are halved to reach that."""


class Ranks:
    """`size` processes, of which this is number `rank`; by default the only one, which exchanges nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: str, device: torch.device) -> Ranks:
        """Wait until all processes are there. `rendezvous`: a file that does not exist yet, the same for all."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)
        return cls(rank, size)

    def share(
        self, divide: Callable[[int], list[list[int]]], cost: Callable[[list[int]], int], max_tokens: int
    ) -> list[list[int]]:
        """This process's micro-batches.

        Args:
            divide: into micro-batches of at most so many tokens.
            cost: of one, in tokens.
            max_tokens: of a micro-batch; they are made smaller where some process would have less to do.
        """
        if self.size == 1:
            return divide(max_tokens)
        shortest = None
        mine = []
        for _ in range(DIVISIONS):
            batches = divide(max_tokens)
            costs = [cost(batch) for batch in batches]
            parts: list[list[int]] = [[] for _ in range(self.size)]
            loads = [0] * self.size
            for i in sorted(range(len(batches)), key=lambda i: -costs[i]):
                least = loads.index(min(loads))
                parts[least].append(i)
                loads[least] += costs[i]
            if shortest is None or max(loads) < shortest:
                shortest = max(loads)
                mine = [batches[i] for i in sorted(parts[self.rank])]
            if max(loads) * self.size <= EVEN * sum(loads):
                break
            max_tokens = min(max_tokens, max(costs)) // 2
        return mine

    def gather(self, part: T) -> list[T]:
        """What each process has, in their order."""
        if self.size == 1:
            return [part]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part)
        return parts

    def union(self, part: Mapping[int, T]) -> dict[int, T]:
        """The entries of all processes."""
        return dict(itertools.chain.from_iterable(each.items() for each in self.gather(dict(part))))

    def add(self, tensor: Tensor) -> None:
        """Make it the sum over the processes."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def add_gradients(self, weights: Collection[nn.Parameter]) -> None:
        """Make each gradient the sum over the processes; a weight without one in any of them has none."""
        if self.size == 1:
            return
        there = [weight.grad is not None for weight in weights]
        for weight, *anywhere in zip(weights, *self.gather(there), strict=True):
            if any(anywhere):
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                dist.all_reduce(weight.grad)
