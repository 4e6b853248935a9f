"""0.3's switches for instrumentations: here all of them switch the adapters of the imported frameworks on and off."""

from __future__ import annotations

from agl_agentlightning.tracer import Tracer

__all__ = ["instrument_all", "uninstrument_all"]

_tracer = Tracer()


def instrument_all() -> None:
    """Trace every framework that is imported by now; 0.3's tracers and runners do so themselves."""
    _tracer.instrument()


def uninstrument_all() -> None:
    """Undo `instrument_all`."""
    _tracer.uninstrument()


instrument_agentops = instrument_agentops_langchain = instrument_litellm = instrument_vllm = instrument_all
uninstrument_agentops = uninstrument_agentops_langchain = uninstrument_litellm = uninstrument_vllm = uninstrument_all
