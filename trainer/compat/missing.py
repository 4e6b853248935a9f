"""Names of Agent Lightning 0.3 that have no counterpart here yet: they exist, and say so when they are used."""

from __future__ import annotations

from typing import Any

from agl.errors import ConfigError

__all__ = ["APO", "LLMProxy", "refuse"]


def refuse(what: str, instead: str = "docs/from-agent-lightning.md says what is there instead") -> ConfigError:
    """The error for something that is not available."""
    return ConfigError(f"{what} is not available in agl", hint=instead)


class APO:
    """Prompt optimisation."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise refuse("APO (prompt optimisation)", "write the loop as an @algo function, or train weights with agl.GRPO")


class LLMProxy:
    """0.3's model proxy; the trainer's gateway has its place."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise refuse(
            "LLMProxy",
            "leave it out: the trainer has a gateway; for a model elsewhere give initial_resources={'llm': LLM(...)}",
        )


class LegacyClient:
    """0.1's client and server over HTTP."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise refuse("0.1's client and server", "use Trainer.fit")


class ClientServerExecutionStrategy:
    """Runners in other processes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise refuse("ClientServerExecutionStrategy", "leave strategy= out: runners share this process")
