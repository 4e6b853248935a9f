"""Strands: agents, model calls and tools become spans at its own middleware stages."""

from agl.adapters.strands.tracer import StrandsTracer
from agl.adapters.strands.wrap import wrap

__all__ = ["StrandsTracer", "wrap"]
