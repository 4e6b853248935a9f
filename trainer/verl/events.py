"""What verl's trainer tells the run, in order, through a queue on the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agl.trainer.verl.rows import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """The servers are up. client: verl's `LLMServerClient`."""

    client: Any


@dataclass(frozen=True, slots=True)
class Begun:
    """Training begins. step: how many are done. steps: in all."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class Asked:
    """Rollouts are wanted."""

    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A checkpoint was written. step: that it is of. path: of its folder."""

    step: int
    path: str


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """A step is done. step: from 1. keys: of the rows that were trained. metrics: verl's."""

    step: int
    keys: tuple[str, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Over:
    """All is done; nothing comes after it."""


Message = Serving | Begun | Asked | Saved | Stepped | Over
Tell = Callable[[Message], None]
