"""What a reward can be: a function of one rollout, which `RewardCaller` calls, or a comparison of a task's rollouts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from agl.errors import AglError, AsException, ConfigError, own_lines
from agl.rewards.arguments import Arguments, name_of
from agl.rewards.trace import Trace
from agl.tracing import context, main_thread
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

    Arguments that are named `task` and `output` get these wherever they stand; under other names, the task is the
    first. One that is named `trace`, or annotated with `Trace`, gets the trace of the attempt so far. Async agents
    await a grader of `agl.rewards` that waits for something, so that it does not block the others.

    Attributes:
        is_async: whether it can only be awaited.

    Raises:
        ConfigError: an argument for which there is no value, or names that contradict their places.
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
        self._arguments = Arguments.of(reward)

    def __call__(self, task: Any, output: Any, trace: Trace | None = None) -> Any:
        """The function's result."""
        positional, named = self._arguments.bind({"task": task, "output": output}, trace)
        with self._named(), AsException():
            return self.reward(*positional, **named)

    async def call_async(self, task: Any, output: Any, trace: Trace | None = None) -> Any:
        """The same, awaited if the function is async. A sync one runs in a thread, where it may call `asyncio.run`."""
        positional, named = self._arguments.bind({"task": task, "output": output}, trace)
        call = functools.partial(self._awaitable or self.reward, *positional, **named)
        with self._named(), AsException():
            value = call() if self._awaitable is not None or self.is_async else await in_thread(call)
            return await value if inspect.isawaitable(value) else value

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An exception of the function's own says whose it is (`raised_by`).

        Raises:
            MainThreadError: it tried what only a main thread may do, and may have taken that for a wrong answer; or the
                agent did, before.
        """
        if (scope := context.current()) is not None:
            main_thread.require_none_refused(f"agent {scope.rollout.agent!r}")
        try:
            yield
            main_thread.require_none_refused(f"the reward {name_of(self.reward)!r}")
        except AglError as error:
            self._name(error)
            raise
        except Exception as error:
            main_thread.require_none_refused(f"the reward {name_of(self.reward)!r}", error)
            self._name(error)
            raise

    def _name(self, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = (own_lines(frames) or frames)[-1]
        error.__dict__[_RAISED_BY] = f"the reward {name_of(self.reward)!r} ({place.filename}:{place.lineno})"


_RAISED_BY = "agl_raised_by"


def raised_by(error: BaseException) -> str | None:
    """The reward function that raised this exception, and where; None if an agent did."""
    return getattr(error, _RAISED_BY, None)
