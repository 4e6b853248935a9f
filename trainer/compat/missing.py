"""Names of Agent Lightning 0.3 that have no counterpart here: they exist, and say so when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from agl.errors import ConfigError

__all__ = ["ClientServerExecutionStrategy", "LLMProxy"]


def refuse(what: str, instead: str = "docs/from-agent-lightning.md says what is there instead") -> ConfigError:
    """The error for something that is not available."""
    return ConfigError(f"{what} is not available in agl", hint=instead)


class NotSetError(ConfigError, ValueError):
    """What an agent or an algorithm has only while it runs; 0.3 raised a ValueError."""


def require(value: Any, owner: str, what: str) -> Any:
    """`value`, which an agent or an algorithm has only while it runs; NotSetError if it is None."""
    if value is None:
        raise NotSetError(f"this {owner} has no {what} yet", hint="it has one while a trainer or a runner runs it")
    return value


def missing_method(name: str, instead: str) -> Callable[..., Any]:
    """An async method that is not available; awaiting it is an error that says what to use."""

    async def method(self: Any, *_: Any, **__: Any) -> Any:
        raise refuse(name, instead)

    return method


class MissingClass:
    """A class that is not available; making an object of it is an error that says what to use."""

    _instead: ClassVar[str]

    def __init_subclass__(cls, instead: str) -> None:
        cls._instead = instead

    def __init__(self, *_: Any, **__: Any) -> None:
        raise refuse(type(self).__name__, self._instead)


class LLMProxy(
    MissingClass,
    instead="leave it out: the trainer has a gateway; for another model give initial_resources={'llm': LLM(...)}",
):
    """0.3's model proxy; the trainer has a gateway instead."""


class ClientServerExecutionStrategy(MissingClass, instead="leave strategy= out: runners share this process"):
    """Runners in other processes."""
