"""Bare OpenAI clients: chat, completions and responses calls become `chat` spans."""

from agl.adapters.openai.tracer import OpenAITracer
from agl.adapters.openai.wrap import wrap

__all__ = ["OpenAITracer", "wrap"]
