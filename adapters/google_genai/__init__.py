"""Bare google-genai clients: `generate_content` calls, those of chats included, become `chat` spans."""

from agl.adapters.google_genai.tracer import GoogleGenAITracer

wrap = GoogleGenAITracer.wrap
"""Make a function task -> output, sync or async, trainable, whichever of the SDKs it calls.

Its name is the function's. It gets the task; scored is its result.
"""

__all__ = ["GoogleGenAITracer", "wrap"]
