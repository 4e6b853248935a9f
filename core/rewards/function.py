"""What a reward can be: a function of one rollout, which `RewardCaller` calls, or a comparison of a task's rollouts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from agl.errors import AglError, ConfigError
from agl.rewards.trace import Trace
from agl.tracing import main_thread
from agl.tracing.threads import in_thread


class GroupReward(Protocol):
    """What `Trainer(group_reward=...)` takes: `agl.rewards.RankJudge`, or your own class."""

    @property
    def label(self) -> str:
        """The reward's name."""
        ...

    async def score(self, task: Any, traces: Sequence[Trace]) -> Sequence[float | Mapping[str, float]]:
        """The rewards of one task's rollouts, in their order; a dict names several.

        Raises:
            RewardError: they cannot be scored; the group is dropped.
            JudgeError: nothing can be scored now; the run ends.
        """
        ...


def is_group_reward(value: Any) -> bool:
    """Whether a reward compares rollouts."""
    return callable(getattr(value, "score", None)) and not callable(value)


class RewardCaller:
    """A reward function (task, output) -> number or dict, which sync and async agents can call.

    An argument that is named `trace`, or annotated with `Trace`, gets the trace of the attempt so far. Async agents
    await a grader of `agl.rewards` that waits for something, so that it does not block the others.

    Attributes:
        is_async: whether it can only be awaited.

    Raises:
        ConfigError: an argument for which there is no value.
    """

    def __init__(self, reward: Callable[..., Any]) -> None:
        if not callable(reward):
            raise ConfigError(
                f"reward= is {reward!r}",
                hint=f"a {type(reward).__name__} compares rollouts: agl.Trainer(group_reward=...)"
                if is_group_reward(reward)
                else "a function (task, output) -> float, or a grader of agl.rewards",
            )
        self.reward = reward
        self._awaitable = getattr(reward, "call_async", None)
        self.is_async = (
            reward.is_async  # type: ignore[attr-defined]
            if self._awaitable is not None
            else inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
        )
        self._trace = _trace_argument(reward)

    def __call__(self, task: Any, output: Any, trace: Trace | None = None) -> Any:
        """The function's result."""
        with self._named():
            return self.reward(task, output, **self._trace_keyword(trace))

    async def call_async(self, task: Any, output: Any, trace: Trace | None = None) -> Any:
        """The same, awaited if the function is async. A sync one runs in a thread, where it may call `asyncio.run`."""
        with self._named():
            keyword = self._trace_keyword(trace)
            if self._awaitable is not None or self.is_async:
                value = (self._awaitable or self.reward)(task, output, **keyword)
            else:
                value = await in_thread(functools.partial(self.reward, task, output, **keyword))
            return await value if inspect.isawaitable(value) else value

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An exception of the function's own says whose it is (`raised_by`).

        Raises:
            MainThreadError: it tried what only a main thread may do, and may have taken that for a wrong answer.
        """
        try:
            yield
            main_thread.require_none_refused(f"the reward {_name(self.reward)!r}")
        except AglError:
            raise
        except Exception as error:
            main_thread.require_none_refused(f"the reward {_name(self.reward)!r}", error)
            place = traceback.extract_tb(error.__traceback__)[-1]
            error.__dict__[_RAISED_BY] = f"the reward {_name(self.reward)!r} ({place.filename}:{place.lineno})"
            raise

    def _trace_keyword(self, trace: Trace | None) -> dict[str, Any]:
        return {} if self._trace is None else {self._trace: Trace.now() if trace is None else trace}


_RAISED_BY = "agl_raised_by"


def raised_by(error: BaseException) -> str | None:
    """The reward function that raised this exception, and where; None if an agent did."""
    return getattr(error, _RAISED_BY, None)


def _name(reward: Callable[..., Any]) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


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
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = sum(p.kind in positional for p in parameters)
    if taken < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(
            f"the reward function {_name(reward)!r} takes no (task, output)",
            hint="it is called with a task and what the agent gave for it: def reward(task, output): ...",
        )
    name = None
    for parameter in parameters[2:]:
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        annotated = hints.get(parameter.name)
        if parameter.name == "trace" or annotated is Trace or Trace in typing.get_args(annotated):
            name = parameter.name
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"the reward function {_name(reward)!r} has an argument {parameter.name!r} that agl cannot fill",
                hint="it gets (task, output), and what the attempt did if an argument is named `trace`",
            )
    return name
