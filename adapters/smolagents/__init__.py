"""smolagents: agents, tools and executed code become spans by methods of its base classes."""

from agl.adapters.smolagents.tracer import SmolagentsTracer

wrap = SmolagentsTracer.wrap
"""Make a `smolagents.CodeAgent` or `ToolCallingAgent` trainable, with the agents that it manages.

Each run gets a copy: a smolagents agent keeps its memory, its state and its interpreter's variables. Model, tools and
callbacks are shared. The copies do not print what an agent does. Its name is `name=`'s, else "agent". Its input is the
task's question. Scored is the final answer. An agent whose code runs elsewhere than in this process (`executor_type`)
is a ConfigError.
"""

__all__ = ["SmolagentsTracer", "wrap"]
