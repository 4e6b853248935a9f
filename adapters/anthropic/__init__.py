"""Bare Anthropic clients: messages calls become `chat` spans."""

from agl.adapters.anthropic.tracer import AnthropicTracer

wrap = AnthropicTracer.wrap
"""Make a function task -> output, sync or async, trainable, whichever of the SDKs it calls.

Its name is the function's. It gets the task; scored is its result.
"""

__all__ = ["AnthropicTracer", "wrap"]
