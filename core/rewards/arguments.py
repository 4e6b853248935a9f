"""How a user's function takes our values: by name where the names are ours or well known, else by place.

Invariant: no argument that has one of our names, or a name that says what it is, gets another value.
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
ROLLOUT = ("task", "resources", "rollout")
"""What the forms of a `LitAgent` get."""
_WELL_KNOWN: Mapping[str, str] = {
    "agent_output": "output",
    "inputs": "task",
    "outputs": "output",
    "solution_str": "output",
}
"""Names that other projects' graders have for our values, verl's and LangSmith's among them, which count as ours."""
_SYNONYMS: Mapping[str, frozenset[str]] = {
    "task": frozenset(
        {
            "case",
            "doc",
            "example",
            "input",
            "instruction",
            "item",
            "problem",
            "prompt",
            "prompts",
            "query",
            "question",
            "record",
            "row",
            "sample",
            "test_case",
            "user_input",
        }
    ),
    "output": frozenset(
        {
            "actual",
            "actual_output",
            "answer",
            "candidate",
            "completion",
            "completions",
            "final_answer",
            "final_output",
            "folder",
            "generated",
            "generated_text",
            "generation",
            "hypothesis",
            "llm_output",
            "llm_response",
            "model_output",
            "pred",
            "predicted",
            "prediction",
            "predictions",
            "reply",
            "response",
            "responses",
            "result",
            "submission",
            "y_pred",
        }
    ),
    "traces": frozenset({"rollouts", "attempts"}),
    "resources": frozenset({"named_resources", "resource"}),
    "rollout": frozenset({"attempted_rollout", "info", "rollout_info"}),
}
"""What people call our values. Such a name decides nothing, but it must not stand in the other value's place."""
_REFERENCES = frozenset(
    {
        "correct_answer",
        "data_source",
        "expected",
        "expected_answer",
        "expected_output",
        "extra_info",
        "gold",
        "gold_answer",
        "golden",
        "ground_truth",
        "ground_truth_answer",
        "ground_truths",
        "gt",
        "label",
        "labels",
        "reference",
        "reference_answer",
        "reference_output",
        "reference_outputs",
        "references",
        "target",
        "targets",
        "y_true",
    }
)
"""What people call parts of a task; none of them is the task, or what the agent gave for it."""
_OTHERS: Mapping[tuple[str, ...], frozenset[str]] = {
    REWARD: _REFERENCES,
    GROUP_REWARD: _REFERENCES,
    ROLLOUT: frozenset({"llm", "mode", "output", "prompt_template", "rollout_id", "step", "trace"}),
}
"""Names of what is none of the values."""


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
    def of(cls, function: Callable[..., Any], values: tuple[str, ...] = REWARD) -> Arguments:
        """Where a function takes these values: `REWARD`, `GROUP_REWARD` or `ROLLOUT`.

        Raises:
            ConfigError: it does not take all, takes something else, or its names contradict their places.
        """
        what = "the method" if values == ROLLOUT else "the reward function"
        who = f"{what} {name_of(function)!r}"
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return cls(values, {})
        others = [p for p in parameters if _by_name(p.name, values) is None]
        trace = None if values == ROLLOUT else _trace_argument(function, others)
        own = [p for p in parameters if p.name != trace and p.kind is not p.VAR_KEYWORD]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in own)
        own = [p for p in own if p.kind is not p.VAR_POSITIONAL]
        taken = {p.name: value for p in own if (value := _by_name(p.name, values)) is not None}
        by_place = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        free = [p for p in by_place if p.name not in taken]
        missing = [value for value in values if value not in taken.values()]
        if variadic and len(free) < len(missing) and not taken:
            return cls(values, {}, trace)
        if len(free) < len(missing):
            raise ConfigError(f"{who} takes no ({', '.join(values)})", hint=_EXPECTED[values])
        taken |= {parameter.name: value for parameter, value in zip(free, missing, strict=False)}
        names = [parameter.name for parameter in by_place[: len(values)]]
        if _contradicts(names, taken, values):
            *others, last = (f"`{value}`" for value in values)
            raise ConfigError(
                f"{who} takes ({', '.join(names)}), whose names contradict their places: it gets ({', '.join(values)})",
                hint=f"call its arguments {', '.join(others)} and {last}, in any order"
                + ("; the reference to compare with is a part of the task" if values == REWARD else ""),
            )
        for parameter in own:
            if parameter.name not in taken and parameter.default is parameter.empty:
                raise ConfigError(
                    f"{who} has an argument {parameter.name!r} that agl cannot fill",
                    hint=f"it gets ({', '.join(values)})"
                    + ("" if values == ROLLOUT else ", and what the attempt did if an argument is named `trace`"),
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


_EXPECTED = {
    REWARD: "it is called with a task and what the agent gave for it: def reward(task, output): ...",
    GROUP_REWARD: f"it is called with both: def score(self, {', '.join(GROUP_REWARD)}): ...",
    ROLLOUT: f"it is called with all: def rollout(self, {', '.join(ROLLOUT)}): ...",
}
"""How a function of each kind is called."""


def _by_name(name: str, values: Sequence[str]) -> str | None:
    """The value that an argument with this name gets wherever it stands; None if its place decides."""
    value = _WELL_KNOWN.get(name, name)
    return value if value in values else None


def is_no_task(name: str) -> bool:
    """Whether a name says that an argument of an agent's function is something else than its task."""
    return name in _OTHERS[ROLLOUT] or any(name in _SYNONYMS[value] for value in ROLLOUT[1:])


def _contradicts(places: Sequence[str], taken: Mapping[str, str], values: tuple[str, ...]) -> bool:
    """Whether the names of a function's first arguments say something else than their places.

    Args:
        places: those names.
        taken: argument -> the value that it would get.
    """
    named = [_by_name(name, values) for name in places]
    meant = [next((value for value in values if name in _SYNONYMS[value]), None) for name in places]
    for name, by_name, meaning, by_place in zip(places, named, meant, values, strict=False):
        if by_name is not None or name not in taken:
            continue
        gets = taken[name]
        if name in _OTHERS[values]:
            return True
        if any(named):
            # Where one of our names decides, an argument that moves must be named for what it gets.
            if meaning != gets and not (meaning is None and gets == by_place):
                return True
        elif meaning not in (None, gets):
            return True
    return False


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
