"""The plans of a run's policies, and what several of them cannot have together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agl.errors import ConfigError
from agl.trainer.local.config import Policy
from agl.trainer.local.gguf import gguf_file
from agl_verl.config.compose import notes
from agl_verl.config.plan import ACTOR, MODEL, Plan, read

_REFILL = "with several policies a step trains the prompts that all of them have: leave it out"
_SINGLE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "trainer.v1.trainer_mode": (("sync",), "use mode='sync', or train the policies one after another"),
    "algorithm.filter_groups.enable": ((False, None), _REFILL),
    "trainer.v1.sampler.sync_refill_failed_groups": ((False, None), _REFILL),
    "trainer.v1.sampler.custom_sampler.path": (
        (None,),
        "with several policies agl's own sampler is used: leave it out",
    ),
}
"""Settings that several policies restrict: dotted key -> supported values, and what to do."""
_KEPT = ("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep")


def plans(plan: Plan, names: Sequence[str], overrides: Mapping[str, Policy]) -> dict[str, Plan]:
    """The plan of each policy, by name.

    Args:
        plan: what the config asks for.
        names: of the policies.
        overrides: name -> where that policy differs.

    Raises:
        ConfigError: a policy's settings are refused, or several policies cannot have them.
    """
    if len(names) > 1:
        _check_together(plan)
    return {name: _plan_of(plan, name, overrides[name]) if name in overrides else plan for name in names}


def _plan_of(plan: Plan, name: str, own: Policy) -> Plan:
    settings = dict(plan.settings)
    if own.model is not None:
        gguf_file(own.model)
        settings[f"{MODEL}.path"] = own.model
    if own.lr is not None:
        settings[f"{ACTOR}.optim.lr"] = own.lr
    if own.lora is not None:
        if own.lora.dropout:
            raise ConfigError(
                f"policy {name!r} has lora.dropout={own.lora.dropout}, which verl's adapters do not have",
                hint="leave it out",
            )
        if own.lora.alpha != int(own.lora.alpha):
            raise ConfigError(
                f"policy {name!r} has lora.alpha={own.lora.alpha}, and verl's adapters take a whole number",
                hint="round it",
            )
        targets = own.lora.target_modules
        settings[f"{MODEL}.lora_rank"], settings[f"{MODEL}.lora_alpha"] = own.lora.rank, int(own.lora.alpha)
        settings[f"{MODEL}.target_modules"] = targets if isinstance(targets, str) else list(targets)
    changed = read(settings)
    notes(changed)  # refuses what verl would ignore
    return changed


def _check_together(plan: Plan) -> None:
    """Refuse what would have trainers ask for different prompts, or delete a checkpoint that the others lack."""
    for key, (values, hint) in _SINGLE.items():
        value = plan.settings.get(key, values[0])
        if value not in values:
            raise ConfigError(f"agents= names several policies, which {key}={value!r} does not allow", hint=hint)
    for key in _KEPT:
        if plan.settings.get(key) == 1:
            raise ConfigError(
                f"agents= names several policies, and {key}=1 would delete one's last checkpoint before the others "
                "have written theirs",
                hint="keep at least 2",
            )
