"""LangChain: agents, chains and tools become spans by its own callback hooks."""

from agl.adapters.langchain.tracer import LangChainTracer

wrap = LangChainTracer.wrap
"""Make `create_agent(...)`, a chain, a model or any other runnable trainable.

Its name is `create_agent(name=...)`'s, else "agent". Its input is the task's question as a user message (a graph), or
the task itself. Scored is the structured response, else the last message's text.
"""

__all__ = ["LangChainTracer", "wrap"]
