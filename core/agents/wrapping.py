"""`agl.wrap`: the adapter that knows an agent makes it trainable."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, Protocol

from agl.agents.agent import Agent, RewardFunction
from agl.agents.frameworks import adapters, broken
from agl.agents.memory import MemoryUse
from agl.errors import ConfigError
from agl.options import reject_unknown


class Adapter(Protocol):
    """An entry point of the group `agl.adapters`: a tracer class that also recognises its framework's agents."""

    @classmethod
    def handles(cls, agent: object) -> bool:
        """Whether `agent` belongs to this framework, by its type and without importing the framework."""
        ...

    @classmethod
    def wrap(cls, agent: Any, reward: RewardFunction | None, **options: Any) -> Agent:
        """The framework's agent as an `Agent`."""
        ...

    def instrument(self) -> Any: ...

    def uninstrument(self) -> Any: ...


def wrap(agent: Any, reward: RewardFunction | None = None, *, memory: Any = None, **options: Any) -> Agent:
    """Make an agent of any supported framework trainable.

    Args:
        agent: a framework's agent, or a function task -> output.
        reward: (task, output) -> float or dict of floats, sync or async.
        memory: an `agl.Memory`, or its `per("agent")`: what rollouts find in it with `agl.memory.search`, and leave
            in it for those of later steps.
        **options: `name`, `input` (task -> the framework's input), `output` (its result -> what is scored),
            `error_reward` (the reward of a run in which the agent raised).

    Raises:
        ConfigError: no adapter knows this type, or `memory` is none.
    """
    for adapter in adapters().values():
        if adapter.handles(agent):
            known = set(inspect.signature(adapter.wrap).parameters) - {"agent", "reward"}
            reject_unknown(options, known, f"agl.wrap of a {type(agent).__name__}")
            wrapped = adapter.wrap(agent, reward, **options)
            return wrapped if memory is None else replace(wrapped, memory=MemoryUse.of(memory))
    unusable = "".join(f"; it cannot import {why}" for why in broken)
    raise ConfigError(
        f"no adapter knows {type(agent).__module__}.{type(agent).__qualname__}",
        hint=f"agl found the adapters {', '.join(adapters()) or 'none'}{unusable}. An adapter for another framework is "
        "found once it is installed; without one, run the agent in a function and use @agl.rollout",
    )
