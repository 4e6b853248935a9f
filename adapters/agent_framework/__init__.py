"""Microsoft Agent Framework: agents, model calls and tools become spans around its own telemetry layers."""

from agl.adapters.agent_framework.tracer import AgentFrameworkTracer

wrap = AgentFrameworkTracer.wrap
"""Make an `agent_framework.Agent`, or any other agent of the framework, trainable; each run has a separate session.

Its name is `Agent(name=...)`'s, else "agent". Its input is the task's question. Scored is the structured output, else
the text. A workflow is a ConfigError: it cannot run twice at once and keeps its messages.
"""

__all__ = ["AgentFrameworkTracer", "wrap"]
