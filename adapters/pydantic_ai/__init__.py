"""Pydantic AI: agents, model calls and tools become spans by a capability that each run inside a rollout is given."""

from agl.adapters.pydantic_ai.tracer import PydanticAITracer

wrap = PydanticAITracer.wrap
"""Make a `pydantic_ai.Agent` trainable.

Its name is `Agent(name=...)`'s, else "agent". Its input is the task's question, or a list of message parts. Scored
is its output, as `output_type` says. An agent that needs `deps` is run in a function (`@agl.rollout`).
"""

__all__ = ["PydanticAITracer", "wrap"]
