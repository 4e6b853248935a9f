"""Microsoft Agent Framework: agents, model calls and tools become spans around its own telemetry layers."""

from agl.adapters.agent_framework.tracer import AgentFrameworkTracer
from agl.adapters.agent_framework.wrap import wrap

__all__ = ["AgentFrameworkTracer", "wrap"]
