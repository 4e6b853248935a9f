"""How a user's reward function takes our values: by name where the names are ours, by place where they are its own.

Invariant: no argument that has one of our names gets another value.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl.errors import ConfigError
from agl.rewards.trace import Trace

REWARD = ("task", "output")
"""What a reward function gets, in this order where the names are its own."""
GROUP_REWARD = ("task", "traces")
"""What a comparison of a task's rollouts gets."""
_SYNONYMS: Mapping[str, frozenset[str]] = {
    "task": frozenset({"sample", "example", "item", "row", "question", "problem", "prompt"}),
    "output": frozenset(
        {"answer", "completion", "response", "reply", "result", "prediction", "pred", "generation", "folder", "text"}
    ),
    "traces": frozenset({"rollouts", "attempts"}),
}
"""What people call our values. Such a name decides nothing, but it must not stand in the other value's place."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Where a function takes our values.

    Attributes:
        positional: the values that are passed by place, in order.
        named: argument -> the value that it gets by name.
        trace: the argument that gets the attempt's trace; None if there is none.
    """

    positional: tuple[str, ...]
    named: Mapping[str, str]
    trace: str | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], values: tuple[str, str] = REWARD) -> Arguments:
        """Where a function takes the two values.

        Raises:
            ConfigError: it does not take both, takes something else, or its names contradict their places.
        """
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return cls(values, {})
        trace = _trace_argument(function, [p for p in parameters if p.name not in values])
        own = [p for p in parameters if p.name != trace and p.kind is not p.VAR_KEYWORD]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in own)
        own = [p for p in own if p.kind is not p.VAR_POSITIONAL]
        taken = {p.name: p.name for p in own if p.name in values}
        by_place = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        free = [p for p in by_place if p.name not in taken]
        missing = [value for value in values if value not in taken]
        if variadic and len(free) < len(missing) and not taken:
            return cls(values, {}, trace)
        if len(free) < len(missing):
            raise ConfigError(
                f"the reward function {name_of(function)!r} takes no ({', '.join(values)})",
                hint="it is called with a task and what the agent gave for it: def reward(task, output): ..."
                if values == REWARD
                else f"it is called with both: def score(self, {', '.join(values)}): ...",
            )
        taken |= {parameter.name: value for parameter, value in zip(free, missing, strict=False)}
        names = [parameter.name for parameter in by_place[: len(values)]]
        if _contradicts(names, taken, values):
            raise ConfigError(
                f"the reward function {name_of(function)!r} takes ({', '.join(names)}), whose names contradict their "
                f"places: it gets ({', '.join(values)})",
                hint=f"call its arguments `{values[0]}` and `{values[1]}`, in any order",
            )
        for parameter in own:
            if parameter.name not in taken and parameter.default is parameter.empty:
                raise ConfigError(
                    f"the reward function {name_of(function)!r} has an argument {parameter.name!r} that agl cannot "
                    "fill",
                    hint=f"it gets ({', '.join(values)}), and what the attempt did if an argument is named `trace`",
                )
        positional: list[str] = []
        for parameter in parameters:
            if parameter.name not in taken or parameter.kind is parameter.KEYWORD_ONLY:
                break
            positional.append(taken.pop(parameter.name))
        return cls(tuple(positional), taken, trace)

    def bind(self, values: Mapping[str, Any], trace: Trace | None = None) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the named arguments of a call with these values."""
        named = {argument: values[value] for argument, value in self.named.items()}
        if self.trace is not None:
            named[self.trace] = Trace.now() if trace is None else trace
        return [values[value] for value in self.positional], named


def name_of(reward: Any) -> str:
    """A reward's name in errors."""
    return getattr(reward, "__name__", type(reward).__name__)


def _contradicts(places: Sequence[str], taken: Mapping[str, str], values: tuple[str, str]) -> bool:
    """Whether the names of a function's first arguments say something else than their places.

    Args:
        places: those names. taken: argument -> the value that it would get.
    """
    if any(name in values for name in taken):
        gets = [(name, taken.get(name, value), value) for name, value in zip(places, values, strict=False)]
        moved = [(name, value) for name, value, by_place in gets if value != by_place]
        return any(name not in (value, *_SYNONYMS[value]) for name, value in moved)
    # Two names of one value, such as (text, answer), decide nothing.
    meant = [next((value for value in values if name in _SYNONYMS[value]), None) for name in places]
    return meant in ([values[1], None], [None, values[0]], [*reversed(values)])


def _trace_argument(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> str | None:
    """The argument that is named `trace`, or annotated as one."""
    called = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = typing.get_type_hints(getattr(called, "__func__", called))
    except Exception:  # an annotation is any expression, and one that is a text may name what is not there
        hints = {}
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for parameter in parameters:
        annotated = hints.get(parameter.name)
        is_trace = parameter.name == "trace" or annotated is Trace or Trace in typing.get_args(annotated)
        if is_trace and parameter.kind not in fixed:
            return parameter.name
    return None
