"""OpenAI Agents SDK: agents, model calls and tools become spans by its own trace processors."""

from agl.adapters.openai_agents.tracer import OpenAIAgentsTracer
from agl.adapters.openai_agents.wrap import wrap

__all__ = ["OpenAIAgentsTracer", "wrap"]
