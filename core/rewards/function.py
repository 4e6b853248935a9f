"""Calling a reward function: sync or async, with the trace of the attempt where it asks for it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from agl.errors import ConfigError
from agl.rewards.trace import Trace


class RewardCaller:
    """A reward function (task, output) -> number or dict, ready to be called by either kind of agent.

    An argument that is named `trace`, or annotated with `Trace`, is given what the attempt has done so far. A grader of
    `agl.rewards` is awaited by async agents where it waits for something, so that others go on.

    Attributes:
        is_async: whether it can only be awaited.

    Raises:
        ConfigError: an argument that nothing can be given for.
    """

    def __init__(self, reward: Callable[..., Any]) -> None:
        self.reward = reward
        self._awaitable = getattr(reward, "call_async", None)
        self.is_async = (
            reward.is_async  # type: ignore[attr-defined]
            if self._awaitable is not None
            else inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
        )
        self._trace = _trace_argument(reward)

    def __call__(self, task: Any, output: Any, trace: Trace | None = None) -> Any:
        """What the function returns."""
        return self.reward(task, output, **self._given(trace))

    async def call_async(self, task: Any, output: Any, trace: Trace | None = None) -> Any:
        """The same, awaited if need be."""
        value = (self._awaitable or self.reward)(task, output, **self._given(trace))
        return await value if inspect.isawaitable(value) else value

    def _given(self, trace: Trace | None) -> dict[str, Any]:
        return {} if self._trace is None else {self._trace: Trace.now() if trace is None else trace}


def _trace_argument(reward: Callable[..., Any]) -> str | None:
    try:
        parameters = list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError):
        return None
    function = reward if inspect.isroutine(reward) else type(reward).__call__
    try:
        hints = typing.get_type_hints(getattr(function, "__func__", function))
    except (NameError, TypeError):
        hints = {}
    found = None
    for parameter in parameters[2:]:
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        annotated = hints.get(parameter.name)
        if parameter.name == "trace" or annotated is Trace or Trace in typing.get_args(annotated):
            found = parameter.name
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"the reward function {getattr(reward, '__name__', type(reward).__name__)!r} has an argument "
                f"{parameter.name!r} that nothing can be given for",
                hint="it gets (task, output), and what the attempt did if an argument is named `trace`",
            )
    return found
