"""CUDA graphs: a GPU replays a computation whose kernels take longer to launch one by one than to run.

Invariant: what a graph gives is what its function gives for the same inputs; where one cannot be recorded, the function
computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
FIRST = 2
"""How often a computation is made before it is recorded, which takes as long as making it two or three times."""


@dataclass(slots=True, eq=False)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor


class Graphs:
    """Computations that were recorded, by key; on other devices than CUDA, none are."""

    def __init__(self, device: torch.device) -> None:
        self._possible = device.type == "cuda"
        self.clear()

    def clear(self) -> None:
        """Forget all, and give their memory back."""
        self._made: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, _Recorded] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._possible else None

    def run(self, key: Hashable, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`compute(*inputs)`, which the next call with any key overwrites.

        Args:
            key: what the computation depends on apart from the values of its inputs. All else that it reads keeps its
                place in memory for as long as the key is in use.
        """
        recorded = self._recorded.get(key)
        if recorded is None:
            made = self._made[key] = self._made.get(key, 0) + 1
            if not self._possible or made <= FIRST:
                return compute(*inputs)
            recorded = self._record(key, compute, inputs)
            if recorded is None:
                return compute(*inputs)
        for place, value in zip(recorded.inputs, inputs, strict=True):
            place.copy_(value)
        recorded.graph.replay()
        return recorded.output

    def _record(self, key: Hashable, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> _Recorded | None:
        places = tuple(value.clone() for value in inputs)
        graph = torch.cuda.CUDAGraph()
        # Casts that autocast keeps would be read again after they are gone.
        caching = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                output = compute(*places)
        except RuntimeError as error:
            _log.info("the model's steps cannot be recorded, and take longer: %s", error)
            self._possible = False
            return None
        finally:
            torch.set_autocast_cache_enabled(caching)
        return self._recorded.setdefault(key, _Recorded(graph, places, output))
