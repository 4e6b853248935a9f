"""Names of Agent Lightning 0.3 that have no counterpart here: they exist, and say so when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from agl.errors import ConfigError

__all__ = [
    "AgentLightningClient",
    "AgentLightningServer",
    "CollectionBasedLightningStore",
    "DevTaskLoader",
]


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


_MISSING = {
    "use InMemoryLightningStore(), or LightningStore(URL) on SQLite or PostgreSQL": "AtomicLabels "
    "AtomicMode Collection DequeBasedQueue DictBasedKeyValue "
    "InMemoryLightningCollections KeyValue LightningCollections ListBasedCollection MongoBasedCollection "
    "MongoBasedKeyValue MongoBasedQueue MongoClientPool MongoLightningCollections MongoLightningStore Queue",
    "leave it out: the store itself sets the states of attempts and rollouts": "rollout_status_from_attempt "
    "scan_unhealthy_rollouts",
    "leave it out: the gateway records tokens, log-probs and rollouts, without LiteLLM": "AddLogprobs "
    "AddReturnTokenIds LightningOpenTelemetry LightningSpanExporter MessageInspectionMiddleware "
    "RolloutAttemptMiddleware StreamConversionMiddleware",
    "use a LightningStoreServer": "ServerDataStore",
    "read the store's statistics()": "ConsoleMetricsBackend MetricsBackend "
    "MultiMetricsBackend PrometheusMetricsBackend get_prometheus_registry setup_multiprocess_prometheus "
    "shutdown_metrics",
    "store.add_otel_span takes the SDK's spans": "handle_otlp_export spans_from_proto",
    "take agl's own training: VERL(config) or agl.GRPO(model=...)": "Tinker TinkerLLM",
}
"""What is there instead -> names that have no counterpart."""


def __getattr__(name: str) -> Any:
    for instead, names in _MISSING.items():
        if name in names.split():
            globals()[name] = type(name, (MissingClass,), {"__doc__": "Not available."}, instead=instead)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class AgentLightningServer(MissingClass, instead="use Trainer.fit; or a LightningStoreServer, for other processes"):
    """0.2's server."""


class AgentLightningClient(MissingClass, instead="use a LightningStoreClient"):
    """0.2's client."""


class DevTaskLoader(MissingClass, instead="give the tasks to Trainer.dev(agent, tasks), resources to the Trainer"):
    """0.2's way to try an agent without a server."""


class CollectionBasedLightningStore(MissingClass, instead="use InMemoryLightningStore(), or LightningStore(URL)"):
    """A store on 0.3's collections."""
