"""What the adapters share: `wrap`, switching instrumentation on and off, and the question that a task asks."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from agl.agents.agent import Agent, RewardFunction, Tracer, scored
from agl.errors import ConfigError
from agl.tracing import sdk_hooks

QUESTION_FIELDS = ("question", "input", "prompt", "query", "text", "task")
"""Fields of a dict task that hold what the user asks, in order of preference."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """How `wrap` runs one agent of a framework.

    Attributes:
        name: the agent's name in its framework, or a default.
        invoke: the framework's input -> the framework's result; a function or a coroutine function.
        input: task -> the framework's input.
        output: the framework's result -> what is scored.
    """

    name: str
    invoke: Callable[[Any], Any]
    input: Callable[[Any], Any]
    output: Callable[[Any], Any]


class InstrumentedTracer:
    """Instrumentation that is on or off for the whole process, however many tracers ask for it, and the framework's
    `wrap`.

    `instrument` and `uninstrument` are idempotent; usable as a context manager. A subclass changes the framework in
    `_install` and restores it in `_restore`; SDK requests are routed meanwhile. It recognises the framework's agents in
    `handles` and says in `runnable` how one is run.

    Attributes:
        modules: a program that is traced without code gets this tracer when it imports one of these.
        answer_errors: "module.Class" of exceptions that the framework raises because of a model's answer -> a key of
            `agl.mdp.faults.CAUSES`. Their subclasses count, too. JSON's and pydantic's own exceptions need none: they
            hold what could not be read, which is compared with the policy's answers.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    answer_errors: ClassVar[Mapping[str, str]] = {}
    _lock = threading.RLock()
    _active: InstrumentedTracer | None = None

    def __init_subclass__(cls) -> None:
        cls._active = None

    @classmethod
    def recognises(cls) -> bool:
        """Whether what was imported under one of `modules` is the framework, not a user's package of the same name."""
        return True

    @staticmethod
    def handles(agent: object) -> bool:
        """Whether `agent` is one of this framework's, recognised by its type without importing the framework."""
        raise NotImplementedError

    @staticmethod
    def runnable(agent: Any) -> Runnable:
        """How `agent` is run.

        Raises:
            ConfigError: the agent cannot be run once for each rollout.
        """
        raise NotImplementedError

    @classmethod
    def tracers(cls) -> tuple[Tracer, ...]:
        """The tracers that are on while a wrapped agent runs."""
        return (cls(),)

    @classmethod
    def wrap(
        cls,
        agent: Any,
        reward: RewardFunction | None = None,
        *,
        name: str | None = None,
        input: Callable[[Any], Any] | None = None,
        output: Callable[[Any], Any] | None = None,
        error_reward: float | None = None,
    ) -> Agent:
        """Make an agent of this framework trainable.

        Args:
            agent: the framework's agent.
            reward: (task, output) -> float or dict of floats, sync or async.
            name: the agent's name; the framework's name for it if None.
            input: task -> the framework's input; the adapter's default if None.
            output: the framework's result -> what is scored; the adapter's default if None.
            error_reward: the reward of a run in which the agent raised. None: such a run is retried, then dropped; one
                that the policy itself caused (an answer that cannot be parsed, a full context, `agl.PolicyFault`)
                gets the lowest reward of its group.

        Raises:
            ConfigError: the agent cannot be run once for each rollout.
        """
        runnable = cls.runnable(agent)
        before = input or runnable.input
        after = output or runnable.output
        invoke: Callable[[Any], Any]
        if inspect.iscoroutinefunction(runnable.invoke):

            async def invoke_async(task: Any) -> Any:
                return after(await runnable.invoke(before(task)))

            invoke = invoke_async
        else:

            def invoke_sync(task: Any) -> Any:
                return after(runnable.invoke(before(task)))

            invoke = invoke_sync
        return scored(name or runnable.name, invoke, reward, tracers=cls.tracers(), error_reward=error_reward)

    @property
    def instrumented(self) -> bool:
        """Whether this framework is instrumented in this process."""
        return type(self)._active is not None

    def instrument(self, **_: Any) -> Self:
        """Switch the hooks on. ImportError if the framework is not installed."""
        with self._lock:
            if type(self)._active is None:
                # From here on: an import below may be what somebody waits for to switch it on.
                type(self)._active = self
                try:
                    sdk_hooks.install()
                    try:
                        self._install()
                    except BaseException:
                        sdk_hooks.uninstall()
                        raise
                except BaseException:
                    type(self)._active = None
                    raise
        return self

    def uninstrument(self, **_: Any) -> None:
        """Restore everything that `instrument` changed."""
        with self._lock:
            active = type(self)._active
            if active is not None:
                active._restore()
                type(self)._active = None
                sdk_hooks.uninstall()

    def __enter__(self) -> Self:
        return self.instrument()

    def __exit__(self, *_: object) -> None:
        self.uninstrument()

    def _install(self) -> None:
        raise NotImplementedError

    def _restore(self) -> None:
        raise NotImplementedError


def question(task: Any) -> str:
    """The text that a task asks.

    Raises:
        ConfigError: a task that holds no such text.
    """
    if isinstance(task, str):
        return task
    if isinstance(task, Mapping):
        for name in QUESTION_FIELDS:
            if isinstance(task.get(name), str):
                return task[name]
        raise ConfigError(
            f"cannot tell which field of the task is the question; it has {', '.join(map(repr, task))}",
            hint=f"name it one of {', '.join(QUESTION_FIELDS)}, or say how with agl.wrap(..., input=lambda task: ...)",
        )
    raise ConfigError(
        f"cannot make an input of a {type(task).__name__} task",
        hint="say how with agl.wrap(..., input=lambda task: ...)",
    )


def question_or_parts(task: Any) -> Any:
    """A list of messages or parts unchanged; of another task, its `question`."""
    return task if isinstance(task, list) else question(task)
