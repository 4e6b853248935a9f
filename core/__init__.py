"""agl trains the LLM agents that people already have. This is the public face; names load on first use.

The core is what an agent's own process needs, on numpy and OpenTelemetry alone: what a call, a message, a reward and a
transition are (`mdp`, `messages`, `rewards`, `credit`), which rollout, agent and tool they belong to (`tracing`,
`instrument`), and what can be run as an agent (`agents`; `testing` checks an adapter). Names that belong to the trainer
say which extra to install if it is not there.

`__init__.pyi` says the same to editors and type checkers.
"""

from agl._lazy import lazy_names
from agl._version import __version__ as __version__

_NAMES = {
    "": ("credit", "environments", "errors", "loggers", "memory", "rewards"),
    "agl.agents": ("Agent", "LitAgent", "Outcome", "RolloutInfo", "Tracer", "rollout"),
    "agl.trainer.runners.command": ("CommandAgent",),
    "agl.agents.hooks": ("Hook",),
    "agl.agents.prompts": ("load_prompts", "save_prompts"),
    "agl.agents.wrapping": ("wrap",),
    "agl.agents.resources": ("LLM", "Dataset", "NamedResources", "PromptTemplate", "SystemPrompt"),
    "agl.errors": ("AglError", "PolicyFault"),
    "agl.mdp": ("Call", "Reward", "Trajectory", "Transition"),
    "agl.mdp.conditions": ("reward",),
    "agl.mdp.selection": ("Selection",),
    "agl.mdp.sequence": ("TrainingRow",),
    "agl.mdp.spans": ("Span",),
    "agl.rewards": ("emit_exception", "emit_message", "emit_object", "emit_reward", "operation"),
    "agl.rewards.air": ("AIR", "air"),
    "agl.trainer.algorithms": (
        "DAPO",
        "DPO",
        "GRPO",
        "GSPO",
        "PPO",
        "REINFORCE",
        "RFT",
        "RLOO",
        "SFT",
        "Baseline",
        "Device",
        "Distill",
        "DrGRPO",
        "Loss",
        "Optimizer",
        "Overlong",
        "REINFORCEPlusPlus",
        "Sampling",
    ),
    "agl_agentlightning.algorithm": ("algorithm",),
    "agl_agentlightning.service": ("LightningClient", "LightningServer"),
    "agl_agentlightning.lightning_store": ("LightningStore", "LightningStoreClient"),
    "agl.trainer.engines.vllm": ("VLLMEngine",),
    "agl.trainer.evaluation.evaluate": ("evaluate", "evaluate_async"),
    "agl.trainer.evaluation.evaluation": ("Evaluation",),
    "agl.trainer.local.config": ("LoraSpec", "Policy"),
    "agl.trainer.memory.memory": ("Memory",),
    "agl_prompts": ("APO", "GEPA"),
    "agl.trainer.report.explain": ("explain",),
    "agl.trainer.run.callbacks": ("Callback", "EarlyStopping", "Webhook"),
    "agl.trainer.run.trainer": ("Result", "Trainer"),
    "agl.trainer.runners.options": ("ProcessRunners", "RayRunners"),
    "agl_harnesses.training": ("harness",),
    "agl_service.client": ("Client",),
    "agl.trainer.traces.stored": ("traces",),
    "agl_verl.algorithm": ("VERL",),
}
"""Module -> the public names that it holds."""

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
