"""agl trains the LLM agents that people already have. This is the public face; names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agl._version import __version__ as __version__

if TYPE_CHECKING:
    from agl import credit, errors, rewards
    from agl.agents.agent import Agent, LitAgent, Outcome, RolloutInfo, Tracer, rollout
    from agl.agents.command import CommandAgent
    from agl.agents.hooks import Hook
    from agl.agents.registry import wrap
    from agl.agents.resources import LLM, Dataset, NamedResources, PromptTemplate
    from agl.errors import AglError
    from agl.mdp.selection import Selection
    from agl.mdp.sequence import Sequence
    from agl.mdp.spans import Span
    from agl.mdp.types import Call, Reward, Trajectory, Transition
    from agl.rewards import emit_exception, emit_message, emit_object, emit_reward, operation
    from agl.rewards.air import AIR, air
    from agl.trainer.algorithms import DAPO, GRPO, GSPO, PPO, RLOO, Baseline, DrGRPO, Overlong, REINFORCEPlusPlus
    from agl.trainer.compat.algorithm import algo as algorithm
    from agl.trainer.compat.service import LightningClient, LightningServer
    from agl.trainer.compat.store import LightningStore, LightningStoreClient
    from agl.trainer.engines.vllm import VLLMEngine
    from agl.trainer.local.config import LoraSpec, Policy
    from agl.trainer.report.explain import explain
    from agl.trainer.run.trainer import Result, Trainer
    from agl.trainer.runners.options import RayRunners
    from agl.trainer.service.client import Client
    from agl.trainer.verl.algorithm import VERL

_NAMES = {
    "agl.agents.agent": ("Agent", "LitAgent", "Outcome", "RolloutInfo", "Tracer", "rollout"),
    "agl.agents.command": ("CommandAgent",),
    "agl.trainer.compat.service": ("LightningClient", "LightningServer"),
    "agl.trainer.compat.store": ("LightningStore", "LightningStoreClient"),
    "agl.errors": ("AglError",),
    "agl.rewards.air": ("AIR", "air"),
    "agl.agents.hooks": ("Hook",),
    "agl.mdp.types": ("Call", "Reward", "Trajectory", "Transition"),
    "agl.agents.registry": ("wrap",),
    "agl.agents.resources": ("LLM", "Dataset", "NamedResources", "PromptTemplate"),
    "agl.rewards": ("emit_exception", "emit_message", "emit_object", "emit_reward", "operation"),
    "agl.mdp.selection": ("Selection",),
    "agl.mdp.sequence": ("Sequence",),
    "agl.mdp.spans": ("Span",),
    "agl.trainer.algorithms": (
        "DAPO",
        "GRPO",
        "GSPO",
        "PPO",
        "RLOO",
        "Baseline",
        "DrGRPO",
        "Overlong",
        "REINFORCEPlusPlus",
    ),
    "agl.trainer.report.explain": ("explain",),
    "agl.trainer.local.config": ("LoraSpec", "Policy"),
    "agl.trainer.runners.options": ("RayRunners",),
    "agl.trainer.service.client": ("Client",),
    "agl.trainer.run.trainer": ("Result", "Trainer"),
    "agl.trainer.engines.vllm": ("VLLMEngine",),
    "agl.trainer.verl.algorithm": ("VERL",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_HOME["algorithm"] = "agl.trainer.compat.algorithm"
_ELSEWHERE = {"algorithm": "algo"}
"""Names that are others at home."""
_MODULES = frozenset({"credit", "errors", "rewards"})

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
