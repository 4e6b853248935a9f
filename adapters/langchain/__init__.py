"""LangChain: agents, chains and tools become spans by its own callback hooks."""

from agl.adapters.langchain.tracer import LangChainTracer
from agl.adapters.langchain.wrap import wrap

__all__ = ["LangChainTracer", "wrap"]
