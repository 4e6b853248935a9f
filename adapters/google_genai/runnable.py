"""A function that calls bare google-genai clients, as an agent."""

from agl.adapters.functions import function_runnable as runnable
from agl.adapters.functions import is_function as handles

__all__ = ["handles", "runnable"]
