"""What a runner can run: a wrapped framework agent, a function, or a class, all behind one `Agent`."""

from __future__ import annotations

import functools
import inspect
import time
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agl.agents.frameworks import ImportedFrameworks, Tracer
from agl.agents.memory import MemoryUse
from agl.agents.resources import LLM, NamedResources, PromptTemplate, RolloutResources, find_resource
from agl.errors import ConfigError
from agl.rewards.arguments import ROLLOUT, Arguments, is_no_task
from agl.rewards.function import RewardCaller


@dataclass(frozen=True, slots=True)
class RolloutInfo:
    """The rollout that an agent runs in: ids, attempt (from 1), mode and training step."""

    rollout_id: str
    attempt: int
    mode: Literal["train", "val", "dev", "collect"] = "train"
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an agent's run.

    Attributes:
        reward: a number, a dict of numbers, or None when rewards were emitted.
        output: the value that was scored; `explain` shows it.
        grading_seconds: how long the reward function took; None without one.
    """

    reward: Any = None
    output: Any = None
    grading_seconds: float | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Agent:
    """A named function that turns a task into an `Outcome`.

    Attributes:
        name: of the outermost agent, which also makes the calls for which no adapter gives a name.
        run: (task, resources, rollout) -> Outcome, or a coroutine of it.
        is_async: whether `run` is awaited on the runner's event loop, not called in a thread.
        tracers: adapters that are on while it runs.
        error_reward: the reward of a run in which the agent raised. None: such a run is retried, then dropped; one that
            the policy itself caused (`agl.mdp.faults`) gets the lowest reward of its group.
        memory: what it remembers from one rollout to a later one; None for nothing.
    """

    name: str
    run: Callable[[Any, NamedResources, RolloutInfo], Outcome | Awaitable[Outcome]]
    is_async: bool
    tracers: tuple[Tracer, ...] = field(default=())
    error_reward: float | None = None
    memory: MemoryUse | None = None


RewardFunction = Callable[..., Any]
"""(task, output) -> number or dict of numbers, sync or async; it also gets the trace if it has an argument `trace`."""


def scored(
    name: str,
    invoke: Callable[[Any], Any],
    reward: RewardFunction | None,
    *,
    tracers: Sequence[Tracer] = (),
    error_reward: float | None = None,
) -> Agent:
    """An agent from a function task -> output, sync or async, and a reward function.

    Raises:
        ConfigError: a reward function with an unknown argument, or an async one for a sync agent.
    """
    caller = RewardCaller(reward) if reward is not None else None
    if inspect.iscoroutinefunction(invoke):

        async def run_async(task: Any, resources: NamedResources, rollout: RolloutInfo) -> Outcome:
            output, began = await invoke(task), time.monotonic()
            if caller is None:
                return Outcome(None, output)
            return Outcome(await caller.call_async(task, output), output, time.monotonic() - began)

        return Agent(name, run_async, True, tuple(tracers), error_reward)
    if caller is not None and caller.is_async:
        raise ConfigError(
            f"agent {name!r} is sync but its reward function is async", hint="make the reward function sync"
        )

    def run(task: Any, resources: NamedResources, rollout: RolloutInfo) -> Outcome:
        output, began = invoke(task), time.monotonic()
        return (
            Outcome(None, output) if caller is None else Outcome(caller(task, output), output, time.monotonic() - began)
        )

    return Agent(name, run, False, tuple(tracers), error_reward)


_INJECTED = ("task", "llm", "prompt_template", "resource", "resources", "rollout")


def rollout(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    error_reward: float | None = None,
    memory: Any = None,
) -> Any:
    """Make an agent of a function: `@agl.rollout def f(task, llm: agl.LLM) -> float`, sync or async.

    Arguments are injected by name (task, llm, prompt_template, resource or resources, rollout) or by annotation (`LLM`,
    `PromptTemplate`, `RolloutInfo`); the first other one is the task. The function returns a reward, a dict of rewards,
    or None after `agl.emit_reward`. The decorated function can still be called directly. The frameworks that it uses
    are traced: the adapter of every imported framework is switched on, unless `Trainer(tracer=)` chooses.
    `memory` is as `agl.wrap` takes it.

    Raises:
        ConfigError: an argument for which there is no value.
    """
    if function is None:
        return functools.partial(rollout, name=name, error_reward=error_reward, memory=memory)
    return FunctionAgent(function, name or function.__name__, error_reward, memory)


class FunctionAgent:
    """An agent made of a function by `agl.rollout`; calling it calls the function."""

    def __init__(
        self, function: Callable[..., Any], name: str, error_reward: float | None = None, memory: Any = None
    ) -> None:
        tracers = (ImportedFrameworks(),)
        use = MemoryUse.of(memory)
        self._function = function
        self._arguments = _argument_kinds(function)
        functools.update_wrapper(self, function)
        is_async = inspect.iscoroutinefunction(function)
        run = _outcome_of(lambda *rollout: function(**self._bind(*rollout)), is_async)
        self.agent = Agent(name, run, is_async, tracers, error_reward, use)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def _bind(self, task: Any, resources: NamedResources, info: RolloutInfo) -> dict[str, Any]:
        values = {}
        for argument, kind in self._arguments.items():
            if kind == "task":
                values[argument] = task
            elif kind in ("resource", "resources"):
                values[argument] = RolloutResources(resources)
            elif kind == "rollout":
                values[argument] = info
            else:
                values[argument] = find_resource(resources, LLM if kind == "llm" else PromptTemplate, argument)
        return values


def _outcome_of(run: Callable[[Any, NamedResources, RolloutInfo], Any], is_async: bool) -> Callable[..., Any]:
    """`run`, sync or async, whose result is a reward or an outcome, as `Agent.run`."""

    def outcome(value: Any) -> Outcome:
        return value if isinstance(value, Outcome) else Outcome(value, value)

    async def run_async(*rollout: Any) -> Outcome:
        return outcome(await run(*rollout))

    return run_async if is_async else lambda *rollout: outcome(run(*rollout))


def _argument_kinds(function: Callable[..., Any]) -> dict[str, str]:
    """Argument -> what is injected for it: one of `_INJECTED`."""
    try:
        hints: Mapping[str, Any] = typing.get_type_hints(function)
    except (NameError, TypeError):
        hints = {}
    by_type = {LLM: "llm", PromptTemplate: "prompt_template", RolloutInfo: "rollout"}
    kinds: dict[str, str] = {}
    unassigned: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"agent {function.__name__!r} takes {parameter.name!r} by position only",
                hint="arguments are passed by name: remove the `/` from its signature",
            )
        if parameter.name in _INJECTED:
            kinds[parameter.name] = parameter.name
        elif (kind := by_type.get(hints.get(parameter.name))) is not None:  # type: ignore[arg-type]
            kinds[parameter.name] = kind
        elif parameter.default is inspect.Parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            unassigned.append(parameter.name)
    if "task" not in kinds.values() and unassigned and not is_no_task(unassigned[0]):
        kinds[unassigned.pop(0)] = "task"
    if unassigned:
        raise ConfigError(
            f"agent {function.__name__!r} has an argument {unassigned[0]!r} that agl cannot fill",
            hint=f"name it one of {', '.join(_INJECTED)}, annotate it with agl.LLM, or give it a default",
        )
    return kinds


class LitAgent:
    """An agent as a class. Override `rollout` or `rollout_async`, or their training and validation forms.

    Each gets (task, resources, rollout), by these names wherever they stand and by place under names of its own, and
    returns a reward, a dict of rewards, or None after `agl.emit_reward`.
    """

    name: str | None = None

    def to_agent(self) -> Agent:
        """The `Agent` of this object.

        Raises:
            ConfigError: neither form is overridden, or one takes other arguments.
        """
        cls, tracers = type(self), (ImportedFrameworks(),)

        def overrides(*names: str) -> bool:
            return any(getattr(cls, n) is not getattr(LitAgent, n) for n in names)

        name = self.name or cls.__name__
        is_async = overrides("rollout_async", "training_rollout_async", "validation_rollout_async")
        if not is_async and not overrides("rollout", "training_rollout", "validation_rollout"):
            raise ConfigError(f"{cls.__name__} overrides neither rollout nor rollout_async", hint="define one of them")

        self.require_forms()

        def run(task: Any, resources: NamedResources, info: RolloutInfo) -> Any:
            mode = "validation" if info.mode == "val" else "training"
            form = getattr(self, f"{mode}_rollout{'_async' if is_async else ''}")
            return call_form(form, task, resources, info)

        return Agent(name, _outcome_of(run, is_async), is_async, tracers)

    def require_forms(self) -> None:
        """Check the arguments of the forms that are overridden.

        Raises:
            ConfigError: one takes others than (task, resources, rollout), or their names contradict their places.
        """
        for mode in ("", "training_", "validation_"):
            for name in (f"{mode}rollout", f"{mode}rollout_async"):
                Arguments.of(getattr(self, name), ROLLOUT)

    def rollout(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        raise NotImplementedError

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        raise NotImplementedError

    def training_rollout(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        return call_form(self.rollout, task, resources, rollout)

    def validation_rollout(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        return call_form(self.rollout, task, resources, rollout)

    async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        return await call_form(self.rollout_async, task, resources, rollout)

    async def validation_rollout_async(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        return await call_form(self.rollout_async, task, resources, rollout)


def call_form(form: Callable[..., Any], task: Any, resources: NamedResources, rollout: Any) -> Any:
    """The result of one of an agent's forms, which gets these values where its arguments' names say."""
    positional, named = Arguments.of(form, ROLLOUT).bind({"task": task, "resources": resources, "rollout": rollout})
    return form(*positional, **named)


def as_agent(value: Any) -> Agent:
    """The `Agent` of a value that a user passes to a trainer.

    Raises:
        ConfigError: a framework's agent that was not wrapped, or a value that cannot run.
    """
    if isinstance(value, Agent):
        return value
    if isinstance(value, FunctionAgent):
        return value.agent
    if isinstance(value, LitAgent):
        return value.to_agent()
    if inspect.isfunction(value) or inspect.ismethod(value):
        return FunctionAgent(value, value.__name__).agent
    raise ConfigError(
        f"cannot run a {type(value).__module__}.{type(value).__qualname__} as it is",
        hint="wrap it: agl.wrap(agent, reward=score), where score(task, output) -> float",
    )
