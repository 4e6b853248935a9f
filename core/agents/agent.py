"""What a runner can run: a wrapped framework agent, a function, or a class, all behind one `Agent`."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agl.agents.resources import LLM, NamedResources, PromptTemplate, RolloutResources, find_resource
from agl.errors import ConfigError
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
    """What an agent's run came to.

    Attributes:
        reward: a number, a dict of numbers, or None when rewards were emitted.
        output: what was scored, shown by `explain`.
    """

    reward: Any = None
    output: Any = None


class Tracer(Protocol):
    """An adapter: while instrumented, a framework's hooks become spans."""

    def instrument(self) -> Any: ...

    def uninstrument(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Agent:
    """A named thing that turns a task into an `Outcome`.

    Attributes:
        name: of the outermost agent; calls that no adapter names are its.
        run: (task, resources, rollout) -> Outcome, or a coroutine of it.
        is_async: whether `run` is to be awaited on the runner's loop rather than called in a thread.
        tracers: adapters to instrument while it runs.
        error_reward: the reward of a run in which the agent itself raised; None = such a run is retried, then dropped.
    """

    name: str
    run: Callable[[Any, NamedResources, RolloutInfo], Outcome | Awaitable[Outcome]]
    is_async: bool
    tracers: tuple[Tracer, ...] = field(default=())
    error_reward: float | None = None


RewardFunction = Callable[..., Any]
"""(task, output) -> number or dict of numbers, sync or async; it gets the trace, too, if it has an argument `trace`."""


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
        ConfigError: a reward function that asks for what nobody can give it, or that cannot be awaited here.
    """
    scorer = RewardCaller(reward) if reward is not None else None
    if inspect.iscoroutinefunction(invoke):

        async def run_async(task: Any, resources: NamedResources, rollout: RolloutInfo) -> Outcome:
            output = await invoke(task)
            return Outcome(await scorer.call_async(task, output) if scorer is not None else None, output)

        return Agent(name, run_async, True, tuple(tracers), error_reward)
    if scorer is not None and scorer.is_async:
        raise ConfigError(
            f"agent {name!r} is sync but its reward function is async", hint="make the reward function sync"
        )

    def run(task: Any, resources: NamedResources, rollout: RolloutInfo) -> Outcome:
        output = invoke(task)
        return Outcome(scorer(task, output) if scorer is not None else None, output)

    return Agent(name, run, False, tuple(tracers), error_reward)


_INJECTED = ("task", "llm", "prompt_template", "resource", "resources", "rollout")


def rollout(
    function: Callable[..., Any] | None = None, *, name: str | None = None, error_reward: float | None = None
) -> Any:
    """Make an agent of a function: `@agl.rollout def f(task, llm: agl.LLM) -> float`, sync or async.

    Arguments are given by name (task, llm, prompt_template, resource or resources, rollout) or by annotation (`LLM`,
    `PromptTemplate`, `RolloutInfo`); the first one left over is the task. It returns a reward, a dict of rewards, or
    None after `agl.emit_reward`. The result stays callable as the plain function.

    Raises:
        ConfigError: an argument that nothing can be given for.
    """
    if function is None:
        return functools.partial(rollout, name=name, error_reward=error_reward)
    return FunctionAgent(function, name or function.__name__, error_reward)


class FunctionAgent:
    """A function that `agl.rollout` made an agent."""

    def __init__(self, function: Callable[..., Any], name: str, error_reward: float | None = None) -> None:
        self._function = function
        self._arguments = _plan(function)
        functools.update_wrapper(self, function)
        if inspect.iscoroutinefunction(function):

            async def run_async(task: Any, resources: NamedResources, info: RolloutInfo) -> Outcome:
                return _outcome(await function(**self._bind(task, resources, info)))

            self.agent = Agent(name, run_async, True, (), error_reward)
        else:

            def run(task: Any, resources: NamedResources, info: RolloutInfo) -> Outcome:
                return _outcome(function(**self._bind(task, resources, info)))

            self.agent = Agent(name, run, False, (), error_reward)

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


def _outcome(value: Any) -> Outcome:
    return value if isinstance(value, Outcome) else Outcome(value, value)


def _plan(function: Callable[..., Any]) -> dict[str, str]:
    try:
        hints: Mapping[str, Any] = typing.get_type_hints(function)
    except (NameError, TypeError):
        hints = {}
    by_type = {LLM: "llm", PromptTemplate: "prompt_template", RolloutInfo: "rollout"}
    plan: dict[str, str] = {}
    left: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"agent {function.__name__!r} takes {parameter.name!r} by position only",
                hint="arguments are given by name: take the `/` out of its signature",
            )
        if parameter.name in _INJECTED:
            plan[parameter.name] = parameter.name
        elif (kind := by_type.get(hints.get(parameter.name))) is not None:  # type: ignore[arg-type]
            plan[parameter.name] = kind
        elif parameter.default is inspect.Parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            left.append(parameter.name)
    if "task" not in plan.values() and left:
        plan[left.pop(0)] = "task"
    if left:
        raise ConfigError(
            f"agent {function.__name__!r} has an argument {left[0]!r} that nothing can be given for",
            hint=f"name it one of {', '.join(_INJECTED)}, annotate it with agl.LLM, or give it a default",
        )
    return plan


class LitAgent:
    """An agent as a class. Override `rollout` or `rollout_async`, and the training/validation forms where they differ.

    Each gets (task, resources, rollout) and returns a reward, a dict of rewards, or None after `agl.emit_reward`.
    """

    name: str | None = None

    def to_agent(self) -> Agent:
        """This as an `Agent`.

        Raises:
            ConfigError: neither form is overridden.
        """
        return _from_class(self)

    def rollout(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        raise NotImplementedError

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        raise NotImplementedError

    def training_rollout(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> Any:
        return await self.rollout_async(task, resources, rollout)


def _from_class(instance: LitAgent) -> Agent:
    cls = type(instance)

    def overrides(*names: str) -> bool:
        return any(getattr(cls, n) is not getattr(LitAgent, n) for n in names)

    name = instance.name or cls.__name__
    if overrides("rollout_async", "training_rollout_async", "validation_rollout_async"):

        async def run_async(task: Any, resources: NamedResources, info: RolloutInfo) -> Outcome:
            method = instance.validation_rollout_async if info.mode == "val" else instance.training_rollout_async
            return _outcome(await method(task, resources, info))

        return Agent(name, run_async, True)
    if not overrides("rollout", "training_rollout", "validation_rollout"):
        raise ConfigError(f"{cls.__name__} overrides neither rollout nor rollout_async", hint="define one of them")

    def run(task: Any, resources: NamedResources, info: RolloutInfo) -> Outcome:
        method = instance.validation_rollout if info.mode == "val" else instance.training_rollout
        return _outcome(method(task, resources, info))

    return Agent(name, run, False)


def as_agent(value: Any) -> Agent:
    """The `Agent` in whatever the user hands to a trainer.

    Raises:
        ConfigError: a framework's agent that was not wrapped, or nothing that can run.
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
