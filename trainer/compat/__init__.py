"""The names that users of Agent Lightning 0.3 know, each one our own part: `import agl.compat as agl`.

Submodules have 0.3's paths (`from agl.compat.algorithm.verl import VERL`). `install()` serves packages that import
`agentlightning` themselves; `python -m agl.compat train.py` runs a program that does, as it is.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from agl._alias import register
from agl.errors import ConfigError

if TYPE_CHECKING:
    from agl.trainer.compat.adapter import (
        Adapter,
        LlmProxyTraceToTriplet,
        TraceAdapter,
        TracerTraceToTriplet,
        TraceToMessages,
        TraceToTripletBase,
    )
    from agl.trainer.compat.algorithm import VERL, Algorithm, Baseline, FastAlgorithm, FunctionalAlgorithm, algo
    from agl.trainer.compat.emitter import (
        emit_annotation,
        emit_exception,
        emit_message,
        emit_object,
        emit_reward,
        find_final_reward,
        find_reward_spans,
        get_message_value,
        get_object_value,
        get_reward_value,
        is_reward_span,
        operation,
    )
    from agl.trainer.compat.litagent import FunctionalLitAgent, LitAgent, llm_rollout, prompt_rollout, rollout
    from agl.trainer.compat.logs import setup_logging
    from agl.trainer.compat.missing import APO, ClientServerExecutionStrategy, LLMProxy
    from agl.trainer.compat.runner import LitAgentRunner, Runner
    from agl.trainer.compat.store import (
        InMemoryLightningStore,
        LightningStore,
        LightningStoreClient,
        LightningStoreServer,
        LightningStoreThreaded,
    )
    from agl.trainer.compat.tracer import AgentOpsTracer, DummyTracer, OtelTracer, Tracer, WeaveTracer
    from agl.trainer.compat.trainer import SharedMemoryExecutionStrategy, Trainer
    from agl.trainer.compat.types import (
        LLM,
        Attempt,
        AttemptedRollout,
        Dataset,
        EnqueueRolloutRequest,
        Hook,
        NamedResources,
        PromptTemplate,
        ProxyLLM,
        ResourcesUpdate,
        Rollout,
        RolloutConfig,
        RolloutMode,
        RolloutStatus,
        Span,
        TaskInput,
        Triplet,
    )

_NAMES = {
    "adapter": ("Adapter", "LlmProxyTraceToTriplet", "TraceAdapter", "TraceToMessages", "TraceToTripletBase",
                "TracerTraceToTriplet"),
    "algorithm": ("VERL", "Algorithm", "Baseline", "FastAlgorithm", "FunctionalAlgorithm", "algo"),
    "emitter": ("emit_annotation", "emit_exception", "emit_message", "emit_object", "emit_reward",
                "find_final_reward", "find_reward_spans", "get_message_value", "get_object_value", "get_reward_value",
                "is_reward_span", "operation"),
    "litagent": ("FunctionalLitAgent", "LitAgent", "llm_rollout", "prompt_rollout", "rollout"),
    "logs": ("setup_logging",),
    "missing": ("APO", "ClientServerExecutionStrategy", "LLMProxy"),
    "runner": ("LitAgentRunner", "Runner"),
    "store": ("InMemoryLightningStore", "LightningStore", "LightningStoreClient", "LightningStoreServer",
              "LightningStoreThreaded"),
    "tracer": ("AgentOpsTracer", "DummyTracer", "OtelTracer", "Tracer", "WeaveTracer"),
    "trainer": ("SharedMemoryExecutionStrategy", "Trainer"),
    "types": ("LLM", "Attempt", "AttemptedRollout", "Dataset", "EnqueueRolloutRequest", "Hook", "NamedResources",
              "PromptTemplate", "ProxyLLM", "ResourcesUpdate", "Rollout", "RolloutConfig", "RolloutMode",
              "RolloutStatus", "Span", "TaskInput", "Triplet"),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = {
    "adapter": "adapter", "adapter.base": "adapter", "adapter.messages": "adapter", "adapter.triplet": "adapter",
    "algorithm": "algorithm", "algorithm.apo": "algorithm", "algorithm.base": "algorithm",
    "algorithm.decorator": "algorithm", "algorithm.fast": "algorithm", "algorithm.verl": "algorithm",
    "emitter": "emitter", "emitter.reward": "emitter", "execution": "", "litagent": "litagent",
    "litagent.decorator": "litagent", "litagent.litagent": "litagent", "llm_proxy": "missing", "logging": "logs",
    "reward": "reward", "runner": "runner", "runner.agent": "runner", "runner.base": "runner", "store": "store",
    "store.base": "store", "store.client_server": "store", "store.memory": "store", "tracer": "tracer",
    "tracer.agentops": "tracer", "tracer.base": "tracer", "tracer.otel": "tracer", "trainer": "trainer",
    "trainer.trainer": "trainer", "types": "types", "types.core": "types", "types.resources": "types",
    "types.tracer": "types",
}  # fmt: skip
"""Path of a module of 0.3 -> ours that holds its names; "" is this one."""

__all__ = [
    "APO", "LLM", "VERL", "Adapter", "AgentOpsTracer", "Algorithm", "Attempt", "AttemptedRollout", "Baseline",
    "ClientServerExecutionStrategy", "Dataset", "DummyTracer", "EnqueueRolloutRequest", "FastAlgorithm",
    "FunctionalAlgorithm", "FunctionalLitAgent", "Hook", "InMemoryLightningStore", "LLMProxy", "LightningStore",
    "LightningStoreClient", "LightningStoreServer", "LightningStoreThreaded", "LitAgent", "LitAgentRunner",
    "LlmProxyTraceToTriplet", "NamedResources", "OtelTracer", "PromptTemplate", "ProxyLLM", "ResourcesUpdate",
    "Rollout", "RolloutConfig", "RolloutMode", "RolloutStatus", "Runner", "SharedMemoryExecutionStrategy", "Span",
    "TaskInput", "TraceAdapter", "TraceToMessages", "TraceToTripletBase", "Tracer", "TracerTraceToTriplet", "Trainer",
    "Triplet", "WeaveTracer", "algo", "emit_annotation", "emit_exception", "emit_message", "emit_object",
    "emit_reward", "find_final_reward", "find_reward_spans", "get_message_value", "get_object_value",
    "get_reward_value", "install", "is_reward_span", "llm_rollout", "operation", "prompt_rollout", "rollout",
    "setup_logging",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}".rstrip("."))
    else:
        # What 0.3 did not have, ours has.
        try:
            return getattr(importlib.import_module("agl"), name)
        except AttributeError:
            raise AttributeError(f"neither agl.compat nor agl has {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _serve(root: str) -> None:
    """Make 0.3's module paths importable under `root`, but for those that are files here."""
    for path, ours in _MODULES.items():
        if root == __name__ and path == ours:
            continue
        register(f"{root}.{path}", f"{__name__}.{ours}".rstrip("."))


def install() -> None:
    """Serve `import agentlightning` (and its submodules) in this process, for packages that import it themselves.

    Raises:
        ConfigError: the real one is imported already.
    """
    there = sys.modules.get("agentlightning")
    this = sys.modules[__name__]
    if there is this:
        return
    if there is not None:
        raise ConfigError(
            "agentlightning is imported already", hint="call agl.compat.install() before anything imports it"
        )
    sys.modules["agentlightning"] = this
    _serve("agentlightning")


_serve(__name__)
_serve("agl.compat")
