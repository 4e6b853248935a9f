"""Better prompts for agents: GEPA and APO, on rollouts that run like any others."""

from agl.trainer.prompts.apo import APO
from agl.trainer.prompts.gepa import GEPA

__all__ = ["APO", "GEPA"]
