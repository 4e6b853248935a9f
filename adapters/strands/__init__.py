"""Strands: agents, model calls and tools become spans at its own middleware stages."""

from agl.adapters.strands.tracer import StrandsTracer

wrap = StrandsTracer.wrap
"""Make a `strands.Agent`, or a graph of such agents, trainable.

Each run gets a copy with the history and the state that the agent has now: a Strands agent keeps its messages, and
refuses to run twice at once. Model and tools are shared. The copies do not print what an agent says. Its name is
`Agent(name=...)`'s, else "agent". Its input is the task's question. Scored is the structured output, else the last
message's text. An agent that cannot be copied (one with a session manager, a swarm) is a ConfigError.
"""

__all__ = ["StrandsTracer", "wrap"]
