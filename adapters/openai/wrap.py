"""A function that calls bare OpenAI clients, as an agent."""

from agl.adapters.functions import is_function as handles
from agl.adapters.functions import wrap_function as wrap

__all__ = ["handles", "wrap"]
