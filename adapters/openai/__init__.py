"""Bare OpenAI clients: chat, completions and responses calls become `chat` spans."""

from agl.adapters.openai.tracer import OpenAITracer

wrap = OpenAITracer.wrap
"""Make a function task -> output, sync or async, trainable, whichever of the SDKs it calls.

Its name is the function's. It gets the task; scored is its result.
"""

__all__ = ["OpenAITracer", "wrap"]
