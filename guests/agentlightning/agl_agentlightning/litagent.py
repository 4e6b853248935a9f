"""0.3's agents: `LitAgent` and the rollout decorators."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from agl import semconv, tracing
from agl.agents import agent as agl_agent
from agl.agents.agent import Agent, Outcome, RolloutInfo
from agl.errors import ConfigError
from agl.mdp.spans import Span
from agl.trainer.gateway.http import keyed
from agl_agentlightning import types as T
from agl_agentlightning.emitter import get_reward_value
from agl_agentlightning.lightning_store import LightningStore
from agl_agentlightning.missing import require

__all__ = ["FunctionalLitAgent", "LitAgent", "llm_rollout", "prompt_rollout", "rollout"]

V = TypeVar("V")
log = logging.getLogger("agl.compat")
MAIN_LLM = "main_llm"
"""The name of the policy's endpoint in 0.3; agl's is "llm"."""


class LitAgent(agl_agent.LitAgent, Generic[V]):
    """0.3's agent class: each form gets (task, resources, rollout), where `rollout` is an `AttemptedRollout`.

    Args:
        trained_agents: regular expression on agents' names: which of them are trained; None = every one.
    """

    trained_agents: str | None = None
    _trainer: Any = None
    _runner: Any = None
    _store: LightningStore | None = None

    def __init__(self, *, trained_agents: str | None = None) -> None:
        self.trained_agents = trained_agents

    def is_async(self) -> bool:
        """Whether an async form is overridden."""
        names = ("rollout_async", "training_rollout_async", "validation_rollout_async")
        return any(getattr(type(self), n) is not getattr(agl_agent.LitAgent, n) for n in names)

    def get_trainer(self) -> Any:
        """The trainer that runs this."""
        return require(self._trainer, "agent", "trainer")

    def get_runner(self) -> Any:
        """The runner that runs this."""
        return require(self._runner or self._trainer, "agent", "runner")

    def get_tracer(self) -> Any:
        """The tracer of its runner."""
        return self.get_runner().tracer

    trainer = property(get_trainer)
    runner = property(get_runner)
    tracer = property(get_tracer)

    def set_trainer(self, trainer: Any) -> None:
        self._trainer = trainer

    def set_runner(self, runner: Any) -> None:
        self._runner = runner

    def to_agent(self) -> Agent:
        """This as an `Agent`, whichever trainer runs it."""
        name = self.name or getattr(self, "__name__", None) or type(self).__name__
        self.require_forms()
        if self.is_async():

            async def run_async(task: Any, resources: T.NamedResources, info: RolloutInfo) -> Outcome:
                rollout, named = await self._arguments_of(task, resources, info)
                train = rollout.mode == "train"
                method = self.training_rollout_async if train else self.validation_rollout_async
                return _outcome(await agl_agent.call_form(method, task, named, rollout))

            return Agent(name, run_async, True)

        def run(task: Any, resources: T.NamedResources, info: RolloutInfo) -> Outcome:
            # A sync agent runs in a separate thread, without an event loop.
            rollout, named = asyncio.run(self._arguments_of(task, resources, info))
            train = rollout.mode == "train"
            method = self.training_rollout if train else self.validation_rollout
            return _outcome(agl_agent.call_form(method, task, named, rollout))

        return Agent(name, run, False)

    async def _arguments_of(
        self, task: Any, resources: T.NamedResources, info: RolloutInfo
    ) -> tuple[T.AttemptedRollout, T.NamedResources]:
        """The rollout and its resources: the trainer's, then the store's where there is one."""
        named = dict(resources)
        if isinstance(llm := resources.get("llm"), T.LLM):
            # 0.3's endpoints took any key, so its programs send their own, with clients that nothing here traces, too.
            endpoint = keyed(llm.endpoint, llm.api_key) if llm.api_key else llm.endpoint
            named = {MAIN_LLM: dataclasses.replace(llm, endpoint=endpoint), **named}
        if self._store is None:
            return _storeless_rollout(task, info), named
        stored = await self._store.agl_store.get_rollout(info.rollout_id)
        attempt = (await self._store.agl_store.query_attempts(info.rollout_id))[info.attempt - 1]
        rollout = T.AttemptedRollout(**vars(T.Rollout.of(stored)), attempt=T.Attempt.of(attempt))
        update = await self._store.resources_of(stored)
        own = update.resources if update else {}
        llm = own.get("llm")
        leased = resources.get("llm")
        if isinstance(llm, T.LLM) and isinstance(leased, T.LLM) and llm.get_base_url() == leased.endpoint:
            # Nothing is routed: this is the store's own resource, with its key, or of a proxy.
            named[MAIN_LLM] = llm
        return rollout, {**named, **own}


class FunctionalLitAgent(LitAgent[V]):
    """A function as 0.3's agent; still callable as that function."""

    def __init__(self, function: Callable[..., Any], *, strip_proxy: bool = True) -> None:
        super().__init__()
        self._function = function
        self._strip_proxy = strip_proxy
        self._parameters = inspect.signature(function).parameters
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def rollout(self, task: Any, resources: T.NamedResources, rollout: Any) -> Any:
        return self._function(task, **self._arguments(resources, rollout))

    async def rollout_async(self, task: Any, resources: T.NamedResources, rollout: Any) -> Any:
        return await self._function(task, **self._arguments(resources, rollout))

    def _arguments(self, resources: T.NamedResources, rollout: Any) -> dict[str, Any]:
        values: dict[str, Callable[[], Any]] = {
            "rollout": lambda: rollout,
            "llm": lambda: self._llm(_first(resources, T.LLM), rollout),
            "prompt_template": lambda: _first(resources, T.PromptTemplate),
            "resources": lambda: resources,
        }
        return {name: value() for name, value in values.items() if name in self._parameters}

    def _llm(self, llm: T.LLM, rollout: Any) -> T.LLM:
        if not (self._strip_proxy and isinstance(llm, T.ProxyLLM)):
            return llm
        return llm.with_attempted_rollout(rollout)


class SignatureError(ConfigError, NotImplementedError):
    """A function that cannot be an agent; 0.3 raised a NotImplementedError."""


def rollout(function: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """Make an agent of `f(task, llm=, prompt_template=, rollout=, resources=)`, sync or async.

    Raises:
        ConfigError: a signature that asks for something else.
    """
    if function is None:
        return functools.partial(rollout, strip_proxy=strip_proxy)
    names = list(inspect.signature(function).parameters)
    known = {"llm", "prompt_template", "rollout", "resources"}
    rest = [n for n in names[1:] if n not in known and _required(function, n)]
    if not names or names[0] in known or rest:
        raise SignatureError(
            f"{getattr(function, '__name__', function)!r} takes ({', '.join(names)}), which does not match any known "
            "agent patterns",
            hint="take the task first, then any of llm, prompt_template, rollout, resources, by these names",
        )
    return FunctionalLitAgent(function, strip_proxy=strip_proxy)


llm_rollout = prompt_rollout = rollout


def _first(resources: T.NamedResources, kind: type) -> Any:
    resource = next((value for value in resources.values() if isinstance(value, kind)), None)
    if resource is None:
        raise ConfigError(
            f"the agent asks for a {kind.__name__}, but the resources are {', '.join(resources) or 'none'}",
            hint="give it with Trainer(initial_resources={...}), or add it to the store",
        )
    return resource


def _required(function: Callable[..., Any], name: str) -> bool:
    parameter = inspect.signature(function).parameters[name]
    return parameter.default is parameter.empty and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


def _storeless_rollout(task: Any, info: RolloutInfo) -> T.AttemptedRollout:
    """The rollout as far as it is known without the store."""
    now = time.time()
    attempt = T.Attempt(
        rollout_id=info.rollout_id,
        attempt_id=T.attempt_id(info.rollout_id, info.attempt),
        sequence_id=info.attempt,
        start_time=now,
        status="running",
    )
    mode: Any = None if info.mode == "dev" else info.mode
    return T.AttemptedRollout(
        rollout_id=info.rollout_id, input=task, start_time=now, mode=mode, status="running", attempt=attempt
    )


def _outcome(value: Any) -> Outcome:
    """The outcome of what 0.3 lets an agent return: a reward, nothing, or spans, which join the attempt's.

    Raises:
        TypeError: it is something else.
    """
    if value is None or isinstance(value, Outcome | float | int):
        if isinstance(value, bool):
            log.warning("Reward is not a number: %r; it counts as %s", value, float(value))
        return value if isinstance(value, Outcome) else Outcome(value, value)
    if isinstance(value, Mapping) and all(
        isinstance(v, float | int) and not isinstance(v, bool) for v in value.values()
    ):
        return Outcome(value, value)
    if not isinstance(value, list):
        raise TypeError(f"Invalid raw result type: {type(value).__name__}. Return a number, None or a list of spans.")
    here = tracing.current()
    assert here is not None
    spans = [_span(s, here.rollout, i) for i, s in enumerate(value, start=1)]
    last = next((s for s in reversed(spans) if get_reward_value(s) is not None), None)
    for span in spans:
        if span is last and span.operation != semconv.REWARD:
            reward = {
                semconv.OPERATION_NAME: semconv.REWARD,
                semconv.REWARD_NAME: "reward",
                semconv.REWARD_VALUE: get_reward_value(span),
                semconv.REWARD_SOURCE: "return",
            }
            span = dataclasses.replace(span, attributes={**span.attributes, **reward})
        here.rollout.spans.append(span)
    return Outcome()


def _span(value: Any, rollout: tracing.RolloutContext, number: int) -> Span:
    """A span that an agent returned, the `number`th, as one of its attempt's."""
    attempt = T.attempt_id(rollout.rollout_id, rollout.attempt)
    if isinstance(value, T.SpanCoreFields):
        value = T.Span.from_core_fields(value, sequence_id=number)
    elif not isinstance(value, T.Span):
        value = T.Span.from_opentelemetry(value, rollout.rollout_id, attempt, number)
    return value.model_copy(update={"rollout_id": rollout.rollout_id, "attempt_id": attempt}).to_agl()
