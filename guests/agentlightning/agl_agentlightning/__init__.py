"""The names that users of Agent Lightning 0.3 know, each one a part of agl: `import agl.compat as agl`.

Submodules have 0.3's paths (`from agl.compat.algorithm.verl import VERL`). `install()` serves packages that import
`agentlightning` themselves; `python -m agl.compat train.py` runs a program that does, unchanged. Names load on first
use; `__init__.pyi` has their types.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from agl._alias import register
from agl.errors import ConfigError

_NAMES = {
    "adapter": "Adapter LlmProxyTraceToTriplet OtelTraceAdapter TraceAdapter TraceToMessages TraceToTripletBase "
    "TracerTraceToTriplet",
    "algorithm": "VERL Algorithm Baseline FastAlgorithm FunctionalAlgorithm algo",
    "cli": "lightning_cli",
    "components": "build_component",
    "execution": "ClientServerExecutionStrategy ExecutionStrategy SharedMemoryExecutionStrategy",
    "emitter": "emit_annotation emit_exception emit_message emit_object emit_reward find_final_reward "
    "find_reward_spans get_message_value get_object_value get_reward_value get_rewards_from_span is_reward_span "
    "operation",
    "env_var": "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var",
    "legacy": "FilterField FilterOptions GenericResponse ParallelWorkerBase Resource ResourceUnion RolloutLegacy "
    "RolloutRawResult RolloutRawResultLegacy SortOptions Task TaskIfAny",
    "litagent": "FunctionalLitAgent LitAgent llm_rollout prompt_rollout rollout",
    "llm_proxy": "LLMProxy",
    "logs": "configure_logger setup_logging setup_module_logging",
    "missing": "AgentLightningClient AgentLightningServer CollectionBasedLightningStore DevTaskLoader",
    "prompts": "APO",
    "runner": "LitAgentRunner Runner",
    "lightning_store": "InMemoryLightningStore LightningStore LightningStoreCapabilities LightningStoreClient "
    "LightningStoreStatistics LightningStoreThreaded",
    "store_server": "LightningStoreServer",
    "otel_types": "AttributeValue Attributes Event Link OtelResource SpanAttributeNames SpanContext SpanCoreFields "
    "SpanLike SpanNames SpanRecordingContext StatusCode TraceState TraceStatus",
    "tracer": "AgentOpsTracer DummyTracer OtelTracer Tracer WeaveTracer clear_active_tracer get_active_tracer "
    "set_active_tracer",
    "trainer": "Trainer",
    "types": "LLM Attempt AttemptStatus AttemptedRollout Dataset EnqueueRolloutRequest Hook NamedResources "
    "PaginatedResult PromptTemplate ProxyLLM ResourcesUpdate Rollout RolloutConfig RolloutMode RolloutStatus Span "
    "TaskInput Triplet Worker WorkerStatus",
    "utils": "ExecutionEvent MultiprocessingEvent ThreadingEvent",
}
"""Module -> its names that are names of this package too."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

_SUBMODULES = {
    "adapter": "base messages triplet",
    "algorithm": "base decorator fast verl",
    "emitter": "annotation exception message object reward",
    "execution": "base client_server events shared_memory",
    "litagent": "decorator litagent",
    "runner": "agent base",
    "store": "base memory mongo threading",
    "tracer": "agentops base dummy otel weave",
    "trainer": "trainer",
    "types": "core resources tracer",
}
_MODULES = {
    **{module: module for module in _SUBMODULES},
    **{f"{module}.{name}": module for module, names in _SUBMODULES.items() for name in names.split()},
    "algorithm.apo": "prompts",
    "algorithm.apo.apo": "prompts",
    "trainer.init_utils": "components",
    "client": "missing",
    "env_var": "env_var",
    "execution.events": "utils",
    "instrumentation": "instrumentation",
    **{f"instrumentation.{name}": "instrumentation" for name in ("agentops", "agentops_langchain", "litellm", "vllm")},
    "cli": "cli",
    "cli.store": "cli",
    "config": "cli",
    "llm_proxy": "llm_proxy",
    "logging": "logs",
    "reward": "emitter",
    "store.client_server": "store_server",
    "utils.server_launcher": "store_server",
    "semconv": "semconv",
    "server": "missing",
    "store.collection": "missing",
    "store.collection.mongo": "missing",
    "store.utils": "missing",
    "utils": "utils",
    "utils.id": "utils",
    "utils.metrics": "missing",
    "utils.otel": "attributes",
    "utils.otlp": "missing",
    "utils.system_snapshot": "utils",
}
"""Path of a module of 0.3 -> the module here that has its names; "" is this package."""
_FURTHER = {"llm_proxy": ("missing", "legacy"), "types": ("otel_types", "legacy")}
"""Package of 0.3 -> further modules with names of its modules."""

__all__ = sorted([*_HOME, "install"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}".rstrip("."))
    else:
        # What 0.3 did not have, agl has.
        try:
            return getattr(importlib.import_module("agl"), name)
        except AttributeError:
            raise AttributeError(f"neither agl.compat nor agl has {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def install() -> None:
    """Serve `import agentlightning` (and its submodules) in this process, for packages that import it themselves.

    Raises:
        ConfigError: the real one is imported already.
    """
    imported = sys.modules.get("agentlightning")
    this = sys.modules[__name__]
    if imported is this:
        return
    if imported is not None:
        raise ConfigError(
            "agentlightning is imported already", hint="call agl.compat.install() before anything imports it"
        )
    sys.modules["agentlightning"] = this
    _serve("agentlightning")


def _serve(root: str) -> None:
    """Make 0.3's module paths importable under `root`, except those that are files here."""
    for path, module in _MODULES.items():
        if root != __name__ or path != module:
            further = (f"{__name__}.{name}" for name in _FURTHER.get(path.partition(".")[0], ()))
            register(f"{root}.{path}", f"{__name__}.{module}".rstrip("."), *further)


_serve(__name__)
_serve("agl.compat")
