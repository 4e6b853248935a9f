"""A plan as GRPO on this machine: which of verl's keys mean there what they mean to verl, and the algorithm."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, cast

from agl.errors import ConfigError, nearest
from agl.trainer.algorithms.family import GRPO
from agl.trainer.local.config import LoraSpec
from agl.trainer.verl.config.plan import ACTOR, MODEL, NUMBERS, ROLLOUT, Plan

NEVER = 1_000_000_000

_ONE_MACHINE = "training on this machine uses one GPU; backend='cluster' uses several"
_SAMPLED_AS_IS = "training samples from the policy itself; leave it out"
_OWN_ORDER = "each epoch is a new permutation of the tasks"
_RESUME = "go on with trainer.fit(resume=True)"
_NOT_HERE = "leave it out, or train it with backend='cluster'"

ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "algorithm.adv_estimator": (
        ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        "use 'grpo', or agl.PPO for a critic on this machine",
    ),
    "algorithm.use_kl_in_reward": ((False,), f"use {ACTOR}.use_kl_loss instead"),
    "algorithm.filter_groups.enable": ((False,), "use agl.DAPO, which draws further tasks in their place"),
    "algorithm.rollout_correction.*": ((None, False, "ppo_clip", 2.0), _NOT_HERE),
    "data.shuffle": ((True,), _OWN_ORDER),
    "data.truncation": (("error",), "a prompt is never cut: the agent gets an error"),
    f"{MODEL}.trust_remote_code": ((False,), "code from a model's repository is not run"),
    f"{ACTOR}.optim.lr_scheduler_type": (("constant",), "use 'constant'"),
    f"{ACTOR}.optim.warmup_style": ((None, "constant"), "use 'constant'"),
    f"{ACTOR}.clip_ratio_c": ((3.0,), "the dual clip is at 3"),
    f"{ACTOR}.policy_loss.loss_mode": (("vanilla", "gspo"), "use 'vanilla' or 'gspo'"),
    f"{ACTOR}.loss_scale_factor": ((None,), "the longest answer is the factor"),
    f"{ACTOR}.kl_loss_type": (
        ("kl", "k1", "mse", "k2", "low_var_kl", "k3"), "use 'kl', 'mse' or 'low_var_kl'",
    ),
    f"{ROLLOUT}.top_p": ((1.0,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.top_k": ((-1, 0), _SAMPLED_AS_IS),
    f"{ROLLOUT}.do_sample": ((True,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.ignore_eos": ((False,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.val_kwargs.top_p": ((1.0,), "leave it out"),
    f"{ROLLOUT}.val_kwargs.top_k": ((-1, 0), "leave it out"),
    f"{ROLLOUT}.val_kwargs.n": ((1,), "each validation task is run once"),
    f"{ROLLOUT}.tensor_model_parallel_size": ((1,), _ONE_MACHINE),
    "reward_model.enable": ((False, None), "the agent's own reward is used"),
    "reward.reward_model.enable": ((False,), "the agent's own reward is used"),
    "critic.enable": ((False, None), "use agl.PPO for a critic on this machine"),
    "trainer.val_only": ((False,), "use agl.Baseline() or Trainer.dev"),
    "trainer.nnodes": ((1,), _ONE_MACHINE),
    "trainer.n_gpus_per_node": ((0, 1), _ONE_MACHINE),
    "trainer.v1.trainer_mode": (("sync",), _NOT_HERE),
    "trainer.resume_mode": (("auto", "disable"), _RESUME),
    "trainer.resume_from_path": ((None, False), _RESUME),
}  # fmt: skip
"""Dotted key -> the values that mean here what they mean to verl, and what to do about another."""

LAYOUT: tuple[str, ...] = (
    f"{MODEL}.use_remove_padding", f"{MODEL}.enable_gradient_checkpointing", f"{MODEL}.enable_activation_offload",
    f"{MODEL}.use_shm", f"{MODEL}.use_fused_kernels", f"{MODEL}.use_liger", f"{MODEL}.fused_kernel_options.*",
    f"{ACTOR}.*micro_batch_size*", f"{ACTOR}.*max_token_len*", f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.strategy",
    f"{ACTOR}.fsdp_config.*", f"{ACTOR}.megatron.*", f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.use_torch_compile", f"{ACTOR}.entropy_*chunking", f"{ACTOR}.entropy_checkpointing",
    f"{ACTOR}.checkpoint.*", f"{ACTOR}.shuffle",
    "actor_rollout_ref.ref.*", "actor_rollout_ref.hybrid_engine",
    f"{ROLLOUT}.name", f"{ROLLOUT}.mode", f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.log_prob_*",
    f"{ROLLOUT}.enforce_eager", f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.enable_*", f"{ROLLOUT}.max_num_*",
    f"{ROLLOUT}.load_format", f"{ROLLOUT}.dtype", f"{ROLLOUT}.disable_log_stats", f"{ROLLOUT}.*parallel_size",
    f"{ROLLOUT}.layered_summon", f"{ROLLOUT}.cudagraph_capture_sizes", f"{ROLLOUT}.calculate_log_probs",
    f"{ROLLOUT}.engine_kwargs.*", f"{ROLLOUT}.agent.*", f"{ROLLOUT}.multi_turn.*",
    f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node", f"{ROLLOUT}.checkpoint_engine.*", "transfer_queue.*",
    "trainer.balance_batch", "trainer.max_*_ckpt_to_keep", "trainer.ray_wait_register_center_timeout", "ray_kwargs.*",
    "trainer.use_v1", "trainer.v1.*", "data.dataloader_num_workers", "data.*_workers",
)  # fmt: skip
"""Where the work is done, how fast and in how much memory: no number changes by it. One machine decides itself."""

UNUSED: tuple[str, ...] = (
    "agentlightning.*", "critic.*", "algorithm.gamma", "algorithm.lam", "algorithm.kl_*", "reward_model.*", "reward.*",
    "data.train_files", "data.val_files", "data.val_batch_size", "data.*_key", "data.filter_overlong_prompts",
    "data.return_*", "data.custom_cls.*", "trainer.critic_warmup", "trainer.logger", "trainer.project_name",
    "trainer.experiment_name", "trainer.default_local_dir", "trainer.default_hdfs_dir", "trainer.log_val_generations",
    "trainer.rollout_data_dir", "trainer.validation_data_dir",
)  # fmt: skip
"""What has no counterpart here; the note names those that were given."""


def check(plan: Plan) -> tuple[str, ...]:
    """The keys given that have no counterpart here.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a value that would have to be ignored.
    """
    unused = []
    for key, value in plan.given.items():
        only = next((only for pattern, only in ONLY.items() if fnmatch.fnmatchcase(key, pattern)), None)
        if only is not None:
            if value not in only[0]:
                raise ConfigError(f"{key}={value!r} cannot be honoured on this machine", hint=only[1])
        elif key in NUMBERS and key not in UNUSED:
            continue
        elif _matches(key, UNUSED):
            unused.append(key)
        elif not _matches(key, LAYOUT) and not _is_default(key, value):
            raise ConfigError(f"the verl config has no key {key!r}", hint=_nearest_key(key))
    if plan.estimator == "gae":
        raise ConfigError(
            "the verl config names no algorithm.adv_estimator; verl's default, 'gae', needs a critic", hint="use 'grpo'"
        )
    if plan.estimator.startswith("reinforce") and plan.gamma != 1:
        raise ConfigError(f"algorithm.gamma={plan.gamma} cannot be honoured on this machine", hint=_NOT_HERE)
    return tuple(unused)


def as_grpo(plan: Plan, n_tasks: int) -> GRPO:
    """The embedded algorithm with those numbers, for a dataset of `n_tasks`."""
    steps = plan.total_steps(n_tasks)
    # verl's scheduler moves once a step, the learner's at every update.
    warmup = plan.warmup_steps if plan.warmup_steps >= 0 else int(plan.warmup_ratio * steps)
    return GRPO(
        model=plan.model,
        adv_estimator=cast(Any, plan.estimator),
        group_size=plan.group_size,
        batch_size=plan.batch_size,
        minibatches=plan.minibatches,
        update_epochs=plan.passes,
        steps=steps,
        learning_rate=plan.learning_rate,
        warmup_steps=warmup * plan.minibatches * plan.passes,
        betas=plan.betas,
        weight_decay=plan.weight_decay,
        grad_clip=plan.grad_clip,
        policy_loss=cast(Any, plan.policy_loss),
        clip_low=plan.clip_low,
        clip_high=plan.clip_high,
        kl_coef=plan.kl_coef,
        kl_kind=cast(Any, plan.kl_kind),
        entropy_coef=plan.entropy_coef,
        loss_agg=cast(Any, plan.loss_agg),
        normalize_std=plan.normalize_std,
        temperature=plan.temperature,
        max_response_tokens=plan.max_response_tokens,
        val_temperature=plan.val_temperature,
        val_every=plan.val_every or NEVER,
        val_before_train=plan.val_before_train,
        lora=LoraSpec(plan.lora_rank, plan.lora_alpha, 0.0, plan.lora_targets) if plan.lora_rank else None,
        # verl's "cuda" is its default rather than a choice; only "cpu" rules the other out.
        device="cpu" if plan.device == "cpu" else "auto",
        max_context=plan.max_context,
        checkpoint_every=plan.checkpoint_every,
    )


def _is_default(key: str, value: Any) -> bool:
    """Whether verl, where it is installed, has that key and this value of it.

    Raises:
        ConfigError: verl has the key, and another value.
    """
    if find_spec("verl") is None or find_spec("hydra") is None:
        return False
    from agl.trainer.verl.config.compose import verls

    known = verls()
    if not known.has(key):
        return False
    default = known.default(key)
    if value == default or (isinstance(default, str) and "${" in default):
        return True
    raise ConfigError(f"{key}={value!r} has no counterpart on this machine", hint=_NOT_HERE)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _nearest_key(key: str) -> str:
    exact = [*NUMBERS, *(p for p in (*ONLY, *LAYOUT, *UNUSED) if "*" not in p)]
    last = key.rpartition(".")[2]
    elsewhere = [k for k in exact if k.rpartition(".")[2] == last]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere else nearest(key, exact)
