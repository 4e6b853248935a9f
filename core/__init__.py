"""agl trains the LLM agents that people already have. This is the public face; names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl import credit, errors, rewards
    from agl.agents import Agent, LitAgent, Outcome, RolloutInfo, Tracer, rollout
    from agl.commands import CommandAgent
    from agl.compat.algorithm import algo as algorithm
    from agl.compat.service import LightningClient, LightningServer
    from agl.compat.store import LightningStore, LightningStoreClient
    from agl.errors import AglError
    from agl.hooks import Hook
    from agl.intermediate import AIR, air
    from agl.mdp import Call, Reward, Trajectory, Transition
    from agl.plugins import wrap
    from agl.resources import LLM, Dataset, NamedResources, PromptTemplate
    from agl.rewards import emit_exception, emit_message, emit_object, emit_reward, operation
    from agl.selection import Selection
    from agl.sequence import Sequence
    from agl.spans import Span
    from agl.trainer.algorithms import DAPO, GRPO, GSPO, PPO, RLOO, VERL, Baseline, DrGRPO, Overlong, REINFORCEPlusPlus
    from agl.trainer.explain import explain
    from agl.trainer.local.config import LoraSpec, Policy
    from agl.trainer.runners.options import RayRunners
    from agl.trainer.service.client import Client
    from agl.trainer.trainer import Result, Trainer
    from agl.trainer.vllm import VLLMEngine

_NAMES = {
    "agl.agents": ("Agent", "LitAgent", "Outcome", "RolloutInfo", "Tracer", "rollout"),
    "agl.commands": ("CommandAgent",),
    "agl.compat.service": ("LightningClient", "LightningServer"),
    "agl.compat.store": ("LightningStore", "LightningStoreClient"),
    "agl.errors": ("AglError",),
    "agl.intermediate": ("AIR", "air"),
    "agl.hooks": ("Hook",),
    "agl.mdp": ("Call", "Reward", "Trajectory", "Transition"),
    "agl.plugins": ("wrap",),
    "agl.resources": ("LLM", "Dataset", "NamedResources", "PromptTemplate"),
    "agl.rewards": ("emit_exception", "emit_message", "emit_object", "emit_reward", "operation"),
    "agl.selection": ("Selection",),
    "agl.sequence": ("Sequence",),
    "agl.spans": ("Span",),
    "agl.trainer.algorithms": (
        "DAPO",
        "GRPO",
        "GSPO",
        "PPO",
        "RLOO",
        "VERL",
        "Baseline",
        "DrGRPO",
        "Overlong",
        "REINFORCEPlusPlus",
    ),
    "agl.trainer.explain": ("explain",),
    "agl.trainer.local.config": ("LoraSpec", "Policy"),
    "agl.trainer.runners.options": ("RayRunners",),
    "agl.trainer.service.client": ("Client",),
    "agl.trainer.trainer": ("Result", "Trainer"),
    "agl.trainer.vllm": ("VLLMEngine",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_HOME["algorithm"] = "agl.compat.algorithm"
_ELSEWHERE = {"algorithm": "algo"}
"""Names that are others at home."""
_MODULES = frozenset({"credit", "errors", "rewards"})

__version__ = "0.1.0"
__all__ = [
    "AIR",
    "Agent",
    "AglError",
    "Baseline",
    "Call",
    "Client",
    "CommandAgent",
    "DAPO",
    "Dataset",
    "DrGRPO",
    "GRPO",
    "GSPO",
    "Hook",
    "LLM",
    "LightningClient",
    "LightningServer",
    "LightningStore",
    "LightningStoreClient",
    "LitAgent",
    "LoraSpec",
    "NamedResources",
    "Outcome",
    "Overlong",
    "PPO",
    "Policy",
    "PromptTemplate",
    "REINFORCEPlusPlus",
    "RLOO",
    "RayRunners",
    "Result",
    "Reward",
    "RolloutInfo",
    "Selection",
    "Sequence",
    "Span",
    "Tracer",
    "Trainer",
    "Trajectory",
    "Transition",
    "VERL",
    "VLLMEngine",
    "air",
    "algorithm",
    "credit",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "errors",
    "explain",
    "operation",
    "rewards",
    "rollout",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"agl.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'agl' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), _ELSEWHERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
