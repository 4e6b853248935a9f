"""LangGraph: the nodes of the user's graphs become agents, by LangChain's callback hooks."""

from agl.adapters.langgraph.tracer import LangGraphTracer

wrap = LangGraphTracer.wrap
"""Make `StateGraph(...).compile(name=...)`, or a function of `@entrypoint`, trainable; its nodes are agents.

Nodes may call bare `openai` clients too. The name is that of the whole: the graph's, else "agent". The graph's input is
the task's question as a user message. Scored is the last message's text, else the final state.
"""

__all__ = ["LangGraphTracer", "wrap"]
