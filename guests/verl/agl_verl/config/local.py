"""A plan as GRPO on this machine: the keys of verl that mean the same here, and the algorithm they define."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from agl.errors import ConfigError, nearest
from agl.trainer.algorithms.policy_gradient import GRPO
from agl.trainer.local.config import LoraSpec
from agl_verl.config.checks import SHARED, SHARED_UNUSED, Supported, first_match, matches
from agl_verl.config.plan import ACTOR, MODEL, NUMBERS, ROLLOUT, Plan

NEVER = 1_000_000_000

_ONE_MACHINE = "training on this machine uses one GPU; backend='cluster' uses several"
_NOT_HERE = "leave it out, or train it with backend='cluster'"

SUPPORTED: Mapping[str, Supported] = {
    **SHARED,
    "algorithm.adv_estimator": (
        ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        "use 'grpo', or agl.PPO for a critic on this machine",
    ),
    # Of the run's trackers; `loggers.split` has read them.
    "trainer.project_name": (None, ""),
    "trainer.experiment_name": (None, ""),
    "algorithm.use_kl_in_reward": ((False,), f"use {ACTOR}.use_kl_loss instead"),
    "algorithm.filter_groups.enable": ((False,), "use agl.DAPO, which draws further tasks in their place"),
    "algorithm.rollout_correction.*": ((None, False, "ppo_clip", 2.0), _NOT_HERE),
    "data.shuffle": ((True,), "each epoch is a new permutation of the tasks"),
    f"{MODEL}.trust_remote_code": ((False,), "code from a model's repository is not run"),
    f"{ACTOR}.optim.lr_scheduler_type": (("constant",), "use 'constant'"),
    f"{ACTOR}.optim.warmup_style": ((None, "constant"), "use 'constant'"),
    f"{ACTOR}.clip_ratio_c": ((3.0,), "the dual clip is at 3"),
    f"{ACTOR}.policy_loss.loss_mode": (("vanilla", "gspo", "cispo"), "use 'vanilla', 'gspo' or 'cispo'"),
    f"{ACTOR}.loss_scale_factor": ((None,), "the longest answer is the factor"),
    f"{ACTOR}.kl_loss_type": (("kl", "k1", "mse", "k2", "low_var_kl", "k3"), "use 'kl', 'mse' or 'low_var_kl'"),
    f"{ROLLOUT}.tensor_model_parallel_size": ((1,), _ONE_MACHINE),
    "reward_model.enable": ((False, None), "the agent's own reward is used"),
    "reward.reward_model.enable": ((False,), "the agent's own reward is used"),
    "critic.enable": ((False, None), "use agl.PPO for a critic on this machine"),
    "trainer.nnodes": ((1,), _ONE_MACHINE),
    "trainer.n_gpus_per_node": ((0, 1), _ONE_MACHINE),
    "trainer.v1.trainer_mode": (("sync",), _NOT_HERE),
}
"""Dotted key, or a pattern of keys -> the values that mean the same here as in verl."""

LAYOUT: tuple[str, ...] = (
    f"{MODEL}.use_remove_padding",
    f"{MODEL}.enable_gradient_checkpointing",
    f"{MODEL}.enable_activation_offload",
    f"{MODEL}.use_shm",
    f"{MODEL}.use_fused_kernels",
    f"{MODEL}.use_liger",
    f"{MODEL}.fused_kernel_options.*",
    f"{ACTOR}.*micro_batch_size*",
    f"{ACTOR}.*max_token_len*",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.strategy",
    f"{ACTOR}.fsdp_config.*",
    f"{ACTOR}.megatron.*",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.use_torch_compile",
    f"{ACTOR}.entropy_*chunking",
    f"{ACTOR}.entropy_checkpointing",
    f"{ACTOR}.checkpoint.*",
    f"{ACTOR}.shuffle",
    f"{ACTOR}.use_prefix_grouper",
    "actor_rollout_ref.ref.*",
    "actor_rollout_ref.hybrid_engine",
    f"{ROLLOUT}.name",
    f"{ROLLOUT}.mode",
    f"{ROLLOUT}.gpu_memory_utilization",
    f"{ROLLOUT}.log_prob_*",
    f"{ROLLOUT}.enforce_eager",
    f"{ROLLOUT}.free_cache_engine",
    f"{ROLLOUT}.enable_*",
    f"{ROLLOUT}.max_num_*",
    f"{ROLLOUT}.load_format",
    f"{ROLLOUT}.dtype",
    f"{ROLLOUT}.disable_log_stats",
    f"{ROLLOUT}.*parallel_size",
    f"{ROLLOUT}.layered_summon",
    f"{ROLLOUT}.cudagraph_capture_sizes",
    f"{ROLLOUT}.calculate_log_probs",
    f"{ROLLOUT}.engine_kwargs.*",
    f"{ROLLOUT}.agent.*",
    f"{ROLLOUT}.multi_turn.*",
    f"{ROLLOUT}.nnodes",
    f"{ROLLOUT}.n_gpus_per_node",
    f"{ROLLOUT}.checkpoint_engine.*",
    "transfer_queue.*",
    "trainer.balance_batch",
    "trainer.max_*_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout",
    "ray_kwargs.*",
    "trainer.use_v1",
    "trainer.v1.*",
    "data.dataloader_num_workers",
    "data.*_workers",
)
"""Placement, speed and memory: these keys change no result, and this machine chooses for itself."""

UNUSED: tuple[str, ...] = (
    *SHARED_UNUSED,
    "critic.*",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.kl_*",
    "reward.*",
    "data.filter_overlong_prompts",
    "data.custom_cls.*",
    "trainer.critic_warmup",
    "trainer.logger",
    "trainer.default_hdfs_dir",
    "trainer.log_val_generations",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
)
"""Keys without a counterpart here; a note names those that the config has."""

SAME = (
    "model",
    "adv_estimator",
    "group_size",
    "batch_size",
    "minibatches",
    "update_epochs",
    "learning_rate",
    "betas",
    "weight_decay",
    "grad_clip",
    "policy_loss",
    "clip_low",
    "clip_high",
    "kl_coef",
    "kl_kind",
    "entropy_coef",
    "loss_agg",
    "normalize_std",
    "temperature",
    "max_response_tokens",
    "val_temperature",
    "val_before_train",
    "max_context",
    "checkpoint_every",
)
"""What `Plan` and `GRPO` have under the same name with the same meaning."""


def check(plan: Plan) -> tuple[str, ...]:
    """Check a plan for this machine.

    Returns:
        The keys of the config that have no counterpart here.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a value that would have to be ignored.
    """
    unused = []
    for key, value in plan.settings.items():
        supported = first_match(key, SUPPORTED)
        if supported is not None:
            values, hint = supported
            if values is not None and value not in values:
                raise ConfigError(f"{key}={value!r} cannot be honoured on this machine", hint=hint)
        elif key in NUMBERS and key not in UNUSED:
            continue
        elif matches(key, UNUSED):
            unused.append(key)
        elif not matches(key, LAYOUT) and not _is_default(key, value):
            raise ConfigError(f"the verl config has no key {key!r}", hint=_nearest_key(key))
    if plan.adv_estimator == "gae":
        raise ConfigError(
            "the verl config names no algorithm.adv_estimator; verl's default, 'gae', needs a critic", hint="use 'grpo'"
        )
    if plan.adv_estimator.startswith("reinforce") and plan.gamma != 1:
        raise ConfigError(f"algorithm.gamma={plan.gamma} cannot be honoured on this machine", hint=_NOT_HERE)
    return tuple(unused)


def as_grpo(plan: Plan, n_tasks: int, chat_template: str | None = None) -> GRPO:
    """The embedded algorithm with the plan's numbers, for a dataset of `n_tasks`."""
    steps = plan.total_steps(n_tasks)
    # verl's scheduler moves once a step, the learner's at every update.
    warmup = plan.warmup_steps if plan.warmup_steps >= 0 else int(plan.warmup_ratio * steps)
    shared: dict[str, Any] = {name: getattr(plan, name) for name in SAME}
    return GRPO(
        **shared,
        steps=steps,
        warmup_steps=warmup * plan.minibatches * plan.update_epochs,
        val_every=plan.val_every or NEVER,
        lora=LoraSpec(plan.lora_rank, plan.lora_alpha, 0.0, plan.lora_targets) if plan.lora_rank else None,
        chat_template=chat_template,
        # verl's "cuda" is its default rather than a choice; only "cpu" rules the other out.
        device="cpu" if plan.device == "cpu" else "auto",
    )


def _is_default(key: str, value: Any) -> bool:
    """Whether verl, where it is installed, has this key with this value as its default.

    Raises:
        ConfigError: verl has the key, and another value.
    """
    if find_spec("verl") is None or find_spec("hydra") is None:
        return False
    from agl_verl.config.compose import verl_schema

    schema = verl_schema()
    if not schema.has(key):
        return False
    default = schema.default(key)
    if value == default or (isinstance(default, str) and "${" in default):
        return True
    raise ConfigError(f"{key}={value!r} has no counterpart on this machine", hint=_NOT_HERE)


def _nearest_key(key: str) -> str:
    exact = [*NUMBERS, *(p for p in (*SUPPORTED, *LAYOUT, *UNUSED) if "*" not in p)]
    last = key.rpartition(".")[2]
    namesakes = [k for k in exact if k.rpartition(".")[2] == last]
    return f"did you mean {namesakes[0]!r}?" if namesakes else nearest(key, exact)
