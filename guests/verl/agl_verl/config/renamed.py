"""Translates keys of verl 0.5 to 0.8 and of Agent Lightning into those of verl 0.9."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from agl.errors import ConfigError
from agl_verl.config.plan import ACTOR, ROLLOUT

RENAMED: Mapping[str, tuple[str, ...]] = {
    # verl 0.9 still lists these two, and reads neither.
    f"{ACTOR}.grad_clip": (f"{ACTOR}.optim.clip_grad",),
    "critic.grad_clip": ("critic.optim.clip_grad",),
    f"{ACTOR}.clip_ratio": (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
    f"{ACTOR}.optim.warmup_style": (f"{ACTOR}.optim.lr_scheduler_type",),
    "critic.optim.warmup_style": ("critic.optim.lr_scheduler_type",),
    f"{ACTOR}.checkpoint.contents": (f"{ACTOR}.checkpoint.save_contents",),
    "critic.checkpoint.contents": ("critic.checkpoint.save_contents",),
    f"{ROLLOUT}.update_weights_bucket_megabytes": (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",),
    "ray_init.num_cpus": ("ray_kwargs.ray_init.num_cpus",),
    "ray_init.timeline_json_file": ("ray_kwargs.timeline_json_file",),
}
"""Old key -> the keys that mean the same now; where the config has one of these too, that one counts."""

SECTIONS: Mapping[str, str] = {"critic.model.fsdp_config.": "critic.fsdp."}
"""Old section -> the new one."""

REMOVED: Mapping[str, str] = {
    f"{ROLLOUT}.chat_scheduler": "the agent runs its own turns; leave it out",
    f"{ROLLOUT}.use_fire_sampling": "training samples from the policy itself; leave it out",
    f"{ROLLOUT}.swap_space": f"it is {ROLLOUT}.engine_kwargs.vllm.swap_space now",
    "algorithm.rollout_is": "it is algorithm.rollout_correction.rollout_is now: 'token', 'sequence' or null",
    "algorithm.rollout_is_*": "it is algorithm.rollout_correction.rollout_is and .rollout_is_threshold now",
    "algorithm.rollout_token_veto_threshold": "it is algorithm.rollout_correction.rollout_rs now",
    "trainer.profile_steps": "it is global_profiler.steps now",
    "trainer.npu_profile.*": "it is global_profiler now",
    "trainer.*_nsight_options.*": "it is global_profiler.global_tool_config.nsys now",
    "async_training.*": "it is trainer.v1.separate_async now",
}
"""Old key without a counterpart -> what to do instead."""


def rename(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config with verl 0.9's keys.

    Raises:
        ConfigError: an old key without a counterpart in verl 0.9, with what to do.
    """
    current: dict[str, Any] = {}
    for key, value in settings.items():
        for old, hint in REMOVED.items():
            if fnmatch.fnmatchcase(key, old):
                raise ConfigError(f"verl 0.9 has no {key} any more", hint=hint)
        for new, translated in _translate(key, value):
            if new == key or new not in settings:
                current[new] = translated
    return current


def _translate(key: str, value: Any) -> list[tuple[str, Any]]:
    if key in RENAMED:
        return [(new, value) for new in RENAMED[key]] if value is not None else []
    if key == f"{ACTOR}.tis_imp_ratio_cap":
        correction = "algorithm.rollout_correction.rollout_is"
        return [(correction, "token"), (f"{correction}_threshold", value)] if value and value > 0 else []
    if key == "trainer.remove_previous_ckpt_in_save":
        return [("trainer.max_actor_ckpt_to_keep", 1), ("trainer.max_critic_ckpt_to_keep", 1)] if value else []
    if key == "trainer.use_legacy_worker_impl":
        if value == "enable":
            raise ConfigError(f"{key}='enable': verl 0.9 has the new workers alone", hint="leave it out")
        return []
    for old, new in SECTIONS.items():
        if key.startswith(old):
            return [(new + key.removeprefix(old), value)]
    return [(key, value)]
