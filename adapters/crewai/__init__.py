"""crewai: agents and tools become spans by methods of its base classes."""

from agl.adapters.crewai.tracer import CrewAITracer

wrap = CrewAITracer.wrap
"""Make a `crewai.Crew` or `crewai.Agent` trainable.

Each run gets crewai's own copy (`crew.copy()`), as `kickoff_for_each` makes them; models and tools are shared. The name
of an agent is its `role`, before inputs are put into it; that of a crew is `Crew(name=...)`'s, unless that is "crew",
else "agent". A crew's inputs are the task's fields; an agent's input is the task's question. Scored is the structured
output, else the text. A crew or an agent with a memory, which all rollouts would share, is a ConfigError.
"""

__all__ = ["CrewAITracer", "wrap"]
