"""Better prompts for agents: GEPA and APO, on rollouts that run like any others."""

from agl_prompts.apo import APO
from agl_prompts.gepa import GEPA

__all__ = ["APO", "GEPA"]
