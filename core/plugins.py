"""Adapters are found by entry point, so a third party's needs no change here."""

from __future__ import annotations

import functools
import inspect
from importlib.metadata import entry_points
from typing import Any, Protocol

from agl.agents import Agent, RewardFunction
from agl.errors import ConfigError, reject_unknown

GROUP = "agl.adapters"


class Adapter(Protocol):
    """What an entry point of the group `agl.adapters` names: a tracer class that also knows its framework's agents."""

    @classmethod
    def handles(cls, agent: object) -> bool:
        """Whether `agent` is one of this framework's, told from its type without importing the framework."""
        ...

    @classmethod
    def wrap(cls, agent: Any, reward: RewardFunction | None, **options: Any) -> Agent:
        """The framework's agent as an `Agent`."""
        ...

    def instrument(self) -> Any: ...

    def uninstrument(self) -> Any: ...


@functools.cache
def adapters() -> dict[str, Any]:
    """Name -> tracer class of every installed adapter, in order of name."""
    return {e.name: e.load() for e in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def wrap(agent: Any, reward: RewardFunction | None = None, **options: Any) -> Agent:
    """Make an agent of any supported framework trainable: the one line.

    Args:
        agent: a framework's agent, or a function task -> output.
        reward: (task, output) -> float or dict of floats, sync or async.
        **options: `name`, `input` (task -> the framework's input), `output` (its result -> what is scored),
            `error_reward` (the reward of a run in which the agent raised).

    Raises:
        ConfigError: no adapter knows this type.
    """
    for adapter in adapters().values():
        if adapter.handles(agent):
            known = set(inspect.signature(adapter.wrap).parameters) - {"agent", "reward"}
            reject_unknown(options, known, f"agl.wrap of a {type(agent).__name__}")
            return adapter.wrap(agent, reward, **options)
    raise ConfigError(
        f"no adapter knows {type(agent).__module__}.{type(agent).__qualname__}",
        hint=f"installed adapters: {', '.join(adapters()) or 'none'}; write a function and use @agl.rollout instead, "
        "or install the framework's extra",
    )
