"""Bare Anthropic clients: messages calls become `chat` spans."""

from agl.adapters.anthropic.tracer import AnthropicTracer
from agl.adapters.anthropic.wrap import wrap

__all__ = ["AnthropicTracer", "wrap"]
