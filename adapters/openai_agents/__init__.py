"""OpenAI Agents SDK: agents, model calls and tools become spans by its own trace processors."""

from agl.adapters.openai_agents.tracer import OpenAIAgentsTracer

wrap = OpenAIAgentsTracer.wrap
"""Make an `agents.Agent`, the one that a run starts with, trainable; it is run by `Runner.run`.

Its input, a text or a list of input items, is the task if it is a list, else its question. Scored is `final_output`.
"""

__all__ = ["OpenAIAgentsTracer", "wrap"]
