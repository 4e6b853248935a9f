"""LangGraph: the nodes of the user's own graphs become agents, by LangChain's callback hooks."""

from agl.adapters.langgraph.tracer import LangGraphTracer
from agl.adapters.langgraph.wrap import wrap

__all__ = ["LangGraphTracer", "wrap"]
