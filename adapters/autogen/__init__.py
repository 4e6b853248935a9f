"""AutoGen: agents, teams and tools become spans by hooks on its base classes."""

from agl.adapters.autogen.tracer import AutoGenTracer
from agl.adapters.autogen.wrap import wrap

__all__ = ["AutoGenTracer", "wrap"]
