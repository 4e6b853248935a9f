"""What 0.3 kept of 0.2's data classes, and its types for annotations alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from agl_agentlightning import types as T
from agl_agentlightning.models import PydanticMethods
from agl_agentlightning.otel_types import SpanCoreFields

__all__ = [
    "FilterField",
    "FilterOptions",
    "GenericResponse",
    "ModelConfig",
    "ParallelWorkerBase",
    "Resource",
    "ResourceUnion",
    "RolloutLegacy",
    "RolloutRawResult",
    "RolloutRawResultLegacy",
    "SortOptions",
    "Task",
    "TaskIfAny",
]

Resource = T.LLM | T.PromptTemplate
ResourceUnion = T.LLM | T.ProxyLLM | T.PromptTemplate
RolloutRawResult = None | float | list[T.Span] | list[SpanCoreFields] | list[Any]
"""What an agent may return: nothing after `emit_reward`, the reward, or spans of its own (0.3's or the SDK's)."""


class FilterField(TypedDict, total=False):
    """What a field is to be."""

    exact: Any
    within: Sequence[Any]
    contains: str


FilterOptions = Mapping[str, FilterField | Literal["and", "or"] | Mapping[str, FilterField]]
"""Field -> condition; "_aggregate" joins them, those of "_must" hold in any case."""


class SortOptions(TypedDict):
    """What results are sorted by."""

    name: str
    order: Literal["asc", "desc"]


class ModelConfig(TypedDict):
    """A model behind an `LLMProxy`, as LiteLLM's configuration names it."""

    model_name: str
    litellm_params: dict[str, Any]


@dataclass
class Task(PydanticMethods):
    """A task of 0.2's server."""

    rollout_id: str
    input: Any
    mode: T.RolloutMode | None = None
    resources_id: str | None = None
    create_time: float | None = None
    last_claim_time: float | None = None
    num_claims: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class TaskIfAny(PydanticMethods):
    """0.2's server's answer to a client that asks for a task."""

    is_available: bool
    task: Task | None = None


@dataclass
class RolloutLegacy(PydanticMethods):
    """The result of a rollout under 0.2."""

    rollout_id: str
    task: Task | None = None
    final_reward: float | None = None
    triplets: list[T.Triplet] | None = None
    trace: list[dict[str, Any]] | None = None
    logs: list[str] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


RolloutRawResultLegacy = None | float | list[T.Triplet] | list[dict[str, Any]] | list[Any] | RolloutLegacy


@dataclass
class GenericResponse(PydanticMethods):
    """An answer of 0.2's server."""

    status: str = "success"
    message: str | None = None
    data: Mapping[str, Any] | None = None


class ParallelWorkerBase:
    """0.3's base class of what runs in several workers: override what you need."""

    def __init__(self) -> None:
        self.worker_id: int | None = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Once, before there are workers."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """In each worker."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The work."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """In each worker, at its end."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Once, at the end."""
