"""Events that verl's trainer sends to the run, in order, through a queue on the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agl.errors import AglError
from agl_verl.rows import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class ServerStart:
    """The servers are up.

    Attributes:
        client: verl's `LLMServerClient`.
    """

    client: Any


@dataclass(frozen=True, slots=True)
class TrainingStart:
    """Training begins.

    Attributes:
        step: how many steps are done.
        steps: how many there are in all.
    """

    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """verl wants the rollouts of these prompts."""

    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint was written.

    Attributes:
        step: the step after which it was written.
        path: its folder.
    """

    step: int
    path: str


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """A step is done.

    Attributes:
        step: from 1.
        keys: of the rows that were trained.
        metrics: verl's.
    """

    step: int
    keys: tuple[str, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The servers get the weights after a step.

    Attributes:
        step: after which; 0 are those that training begins with.
        done: whether they have them, and it was checked.
    """

    step: int
    done: bool


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """The last event of a trainer: training is done."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingFailure:
    """Training is over, with an error.

    Attributes:
        error: with what to do next.
    """

    error: AglError


Event = (
    ServerStart
    | TrainingStart
    | RolloutRequest
    | Checkpoint
    | StepResult
    | WeightUpdate
    | TrainingEnd
    | TrainingFailure
)
Send = Callable[[Event], None]
