"""Reads a hydra-style verl config dict: every key is known, used or named as unused, and none is dropped in silence.

Names and defaults are those of verl's `trainer/config/ppo_trainer.yaml` (0.5 to 0.9) under Agent Lightning 0.3's own
overrides.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl.errors import ConfigError, nearest

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"

MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Key:
    """What a key of the config means to us.

    Attributes:
        field: of `VerlSettings`; None for a key whose value must be one of `only`.
        default: verl's. only: the values that we can honour; empty for any. why: what to do about another value.
        convert: value -> the field's.
    """

    field: str | None = None
    default: Any = None
    only: tuple[Any, ...] = ()
    why: str = ""
    convert: Callable[[Any], Any] = lambda value: value


def _optional_steps(value: Any) -> int | None:
    """-1, 0 and None all mean never in verl."""
    return None if value is None or value <= 0 else int(value)


def _kl_kind(value: Any) -> str:
    kinds = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    if value not in kinds:
        raise ConfigError(f"{_ACTOR}.kl_loss_type={value!r} is not known", hint=nearest(str(value), kinds))
    return kinds[value]


_ONE_MACHINE = "training on several GPUs or machines is not available yet: set it to 1"
_SAMPLED_AS_IS = "training samples from the policy itself; leave it out"

KEYS: Mapping[str, Key] = {
    "algorithm.adv_estimator": Key(default=None, only=("grpo",), why="use 'grpo'; others are not there"),
    "algorithm.norm_adv_by_std_in_grpo": Key("normalize_std", True, convert=bool),
    "algorithm.use_kl_in_reward": Key(default=False, only=(False,), why=f"use {_ACTOR}.use_kl_loss instead"),
    "data.train_batch_size": Key("batch_size", 1024, convert=int),
    "data.max_prompt_length": Key("max_prompt_tokens", 512, convert=int),
    "data.max_response_length": Key("max_response_tokens", 512, convert=int),
    "data.shuffle": Key(default=True, only=(True,), why="each epoch is a new permutation of the tasks"),
    "data.seed": Key("seed", None),
    "data.truncation": Key(default="error", only=("error",), why="a prompt is never cut: the agent gets an error"),
    f"{_MODEL}.path": Key("model", MISSING, convert=str),
    f"{_MODEL}.trust_remote_code": Key(default=False, only=(False,), why="code from a model's repository is not run"),
    f"{_MODEL}.lora_rank": Key("lora_rank", 0, convert=int),
    f"{_MODEL}.lora_alpha": Key("lora_alpha", 16, convert=float),
    f"{_MODEL}.target_modules": Key(
        "lora_targets", "all-linear", convert=lambda value: value if isinstance(value, str) else tuple(value)
    ),
    f"{_ACTOR}.ppo_mini_batch_size": Key("mini_batch_size", 256, convert=int),
    f"{_ACTOR}.ppo_epochs": Key("passes", 1, convert=int),
    f"{_ACTOR}.optim.lr": Key("learning_rate", 1e-6, convert=float),
    f"{_ACTOR}.optim.betas": Key("betas", (0.9, 0.999), convert=tuple),
    f"{_ACTOR}.optim.weight_decay": Key("weight_decay", 0.01, convert=float),
    f"{_ACTOR}.optim.lr_warmup_steps": Key("warmup_steps", -1, convert=int),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": Key("warmup_ratio", 0.0, convert=float),
    f"{_ACTOR}.optim.lr_scheduler_type": Key(default="constant", only=("constant",), why="use 'constant'"),
    f"{_ACTOR}.optim.warmup_style": Key(default=None, only=(None, "constant"), why="use 'constant'"),
    f"{_ACTOR}.optim.clip_grad": Key("clip_grad", None),
    f"{_ACTOR}.grad_clip": Key("grad_clip", 1.0, convert=float),
    f"{_ACTOR}.use_kl_loss": Key("use_kl_loss", False, convert=bool),
    f"{_ACTOR}.kl_loss_coef": Key("kl_coef", 0.001, convert=float),
    f"{_ACTOR}.kl_loss_type": Key("kl_kind", "low_var_kl", convert=_kl_kind),
    f"{_ACTOR}.entropy_coeff": Key("entropy_coef", 0.0, convert=float),
    f"{_ACTOR}.clip_ratio": Key("clip_ratio", 0.2, convert=float),
    f"{_ACTOR}.clip_ratio_low": Key("clip_low", None),
    f"{_ACTOR}.clip_ratio_high": Key("clip_high", None),
    f"{_ACTOR}.clip_ratio_c": Key(default=3.0, only=(3.0,), why="the dual clip is at 3"),
    f"{_ACTOR}.loss_agg_mode": Key("loss_agg", "token-mean", convert=str),
    f"{_ACTOR}.policy_loss.loss_mode": Key(default="vanilla", only=("vanilla",), why="use 'vanilla', PPO's own"),
    f"{_ROLLOUT}.n": Key("group_size", 1, convert=int),
    f"{_ROLLOUT}.temperature": Key("temperature", 1.0, convert=float),
    f"{_ROLLOUT}.top_p": Key(default=1.0, only=(1.0,), why=_SAMPLED_AS_IS),
    f"{_ROLLOUT}.top_k": Key(default=-1, only=(-1, 0), why=_SAMPLED_AS_IS),
    f"{_ROLLOUT}.do_sample": Key(default=True, only=(True,), why=_SAMPLED_AS_IS),
    f"{_ROLLOUT}.ignore_eos": Key(default=False, only=(False,), why=_SAMPLED_AS_IS),
    f"{_ROLLOUT}.max_model_len": Key("max_context", None),
    f"{_ROLLOUT}.val_kwargs.temperature": Key("val_temperature", 0.0, convert=float),
    f"{_ROLLOUT}.val_kwargs.top_p": Key(default=1.0, only=(1.0,), why="leave it out"),
    f"{_ROLLOUT}.val_kwargs.top_k": Key(default=-1, only=(-1, 0), why="leave it out"),
    f"{_ROLLOUT}.val_kwargs.n": Key(default=1, only=(1,), why="each validation task is run once"),
    f"{_ROLLOUT}.val_kwargs.do_sample": Key("val_sampled", None),
    f"{_ROLLOUT}.tensor_model_parallel_size": Key(default=1, only=(1,), why=_ONE_MACHINE),
    "reward_model.enable": Key(default=False, only=(False,), why="the agent's own reward is used"),
    "trainer.total_epochs": Key("epochs", 30, convert=int),
    "trainer.total_training_steps": Key("steps", None),
    "trainer.test_freq": Key("val_every", -1, convert=_optional_steps),
    "trainer.save_freq": Key("checkpoint_every", -1, convert=_optional_steps),
    "trainer.val_before_train": Key("val_before_train", True, convert=bool),
    "trainer.val_only": Key(default=False, only=(False,), why="use agl.Baseline() or Trainer.dev"),
    "trainer.device": Key("device", None),
    "trainer.nnodes": Key(default=1, only=(1,), why=_ONE_MACHINE),
    "trainer.n_gpus_per_node": Key(default=1, only=(0, 1), why=_ONE_MACHINE),
    "trainer.resume_mode": Key(default="auto", only=("auto", "disable"), why="go on with trainer.fit(resume=True)"),
    "trainer.resume_from_path": Key(default=None, only=(None, False), why="go on with trainer.fit(resume=True)"),
}  # fmt: skip
"""Dotted key -> what it means."""

LAYOUT: tuple[str, ...] = (
    f"{_MODEL}.use_remove_padding", f"{_MODEL}.enable_gradient_checkpointing", f"{_MODEL}.enable_activation_offload",
    f"{_MODEL}.use_shm", f"{_MODEL}.use_fused_kernels", f"{_MODEL}.use_liger", f"{_MODEL}.fused_kernel_options.*",
    f"{_ACTOR}.*micro_batch_size*", f"{_ACTOR}.*max_token_len*", f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.strategy",
    f"{_ACTOR}.fsdp_config.*", f"{_ACTOR}.megatron.*", f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ACTOR}.use_torch_compile", f"{_ACTOR}.entropy_*chunking", f"{_ACTOR}.entropy_checkpointing",
    f"{_ACTOR}.checkpoint.*", f"{_ACTOR}.shuffle",
    "actor_rollout_ref.ref.*", "actor_rollout_ref.hybrid_engine",
    f"{_ROLLOUT}.name", f"{_ROLLOUT}.mode", f"{_ROLLOUT}.gpu_memory_utilization", f"{_ROLLOUT}.log_prob_*",
    f"{_ROLLOUT}.enforce_eager", f"{_ROLLOUT}.free_cache_engine", f"{_ROLLOUT}.enable_*", f"{_ROLLOUT}.max_num_*",
    f"{_ROLLOUT}.load_format", f"{_ROLLOUT}.dtype", f"{_ROLLOUT}.disable_log_stats", f"{_ROLLOUT}.*parallel_size",
    f"{_ROLLOUT}.layered_summon", f"{_ROLLOUT}.cudagraph_capture_sizes", f"{_ROLLOUT}.calculate_log_probs",
    f"{_ROLLOUT}.engine_kwargs.*", f"{_ROLLOUT}.agent.*", f"{_ROLLOUT}.multi_turn.*",
    "trainer.balance_batch", "trainer.max_*_ckpt_to_keep", "trainer.ray_wait_register_center_timeout", "ray_kwargs.*",
    "data.dataloader_num_workers", "data.*_workers",
)  # fmt: skip
"""Where the work is done, how fast and in how much memory: no number changes by it. One machine decides itself."""

UNUSED: tuple[str, ...] = (
    "agentlightning.*", "critic.*", "algorithm.gamma", "algorithm.lam", "algorithm.kl_*", "reward_model.*",
    "data.train_files", "data.val_files", "data.val_batch_size", "data.*_key", "data.filter_overlong_prompts",
    "data.return_*", "data.custom_cls.*", "trainer.critic_warmup", "trainer.logger", "trainer.project_name",
    "trainer.experiment_name", "trainer.default_local_dir", "trainer.default_hdfs_dir", "trainer.log_val_generations",
    "trainer.rollout_data_dir", "trainer.validation_data_dir",
)  # fmt: skip
"""What has no counterpart here; the note names those that were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlSettings:
    """The numbers of a verl config, under our names, defaults filled in.

    Attributes:
        model: directory or hub id. lora_*: 0 trains all weights.
        batch_size: tasks per step. group_size: rollouts per task. mini_batch_size: tasks per optimiser step.
        max_prompt_tokens, max_response_tokens: of one call; max_context: of both, if given.
        epochs, steps: how long; steps, where given, count.
        val_every, checkpoint_every: in steps; None for never.
        kl_coef: 0 without a KL loss. clip_low, clip_high: of the importance ratio.
        unused: the keys given that have no counterpart here.
    """

    model: str
    lora_rank: int
    lora_alpha: float
    lora_targets: str | tuple[str, ...]
    batch_size: int
    group_size: int
    mini_batch_size: int
    passes: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_context: int | None
    seed: int | None
    epochs: int
    steps: int | None
    val_every: int | None
    val_before_train: bool
    checkpoint_every: int | None
    device: str | None
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int
    warmup_ratio: float
    grad_clip: float
    clip_low: float
    clip_high: float
    kl_coef: float
    kl_kind: str
    entropy_coef: float
    loss_agg: str
    normalize_std: bool
    temperature: float
    val_temperature: float
    unused: tuple[str, ...] = field(default=())

    @property
    def minibatches(self) -> int:
        """Optimiser steps per pass over a batch."""
        return self.batch_size // self.mini_batch_size

    def total_steps(self, n_tasks: int) -> int:
        """Steps in all: verl drops an epoch's incomplete last batch. At least one, for a dataset below one batch."""
        return self.steps or max(1, n_tasks // self.batch_size * self.epochs)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf, in order."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in KEYS:
            yield from flatten(value, f"{key}.")
        else:
            yield key.removeprefix("+").removeprefix("+"), value


def read(config: Mapping[str, Any]) -> VerlSettings:
    """Check a config against what is known and take its numbers.

    Args:
        config: nested dicts as given to verl, for example `{"data": {"train_batch_size": 8}, ...}`; dotted keys too.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a value that would have to be ignored.
    """
    given = dict(flatten(config))
    unused = []
    for key, value in given.items():
        known = KEYS.get(key)
        if known is not None:
            if known.only and value not in known.only:
                raise ConfigError(f"{key}={value!r} cannot be honoured", hint=known.why)
        elif _matches(key, UNUSED):
            unused.append(key)
        elif not _matches(key, LAYOUT):
            raise ConfigError(f"the verl config has no key {key!r}", hint=_nearest_key(key))
    if "algorithm.adv_estimator" not in given:
        raise ConfigError(
            "the verl config names no algorithm.adv_estimator; verl's default, 'gae', needs a critic", hint="use 'grpo'"
        )
    values: dict[str, Any] = {}
    for key, known in KEYS.items():
        if known.field is None:
            continue
        value = given.get(key, known.default)
        if value is MISSING:
            raise ConfigError(f"the verl config has no {key}", hint="name a model directory or a hub id")
        try:
            values[known.field] = None if value is None else known.convert(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}={value!r}: {error}", hint="see verl's documentation of that key") from error
    return _settle(values, tuple(unused))


def _settle(values: dict[str, Any], unused: tuple[str, ...]) -> VerlSettings:
    """Where several keys say one thing, what they come to."""
    ratio = values.pop("clip_ratio")
    for side in ("clip_low", "clip_high"):
        values[side] = ratio if values[side] is None else float(values[side])
    if not values.pop("use_kl_loss"):
        values["kl_coef"] = 0.0
    clip_grad = values.pop("clip_grad")
    values["grad_clip"] = float(clip_grad) if clip_grad is not None else values["grad_clip"]
    if values.pop("val_sampled") is False:
        values["val_temperature"] = 0.0
    batch, mini = values["batch_size"], values["mini_batch_size"]
    values["mini_batch_size"] = mini = min(batch, mini)
    if batch <= 0 or mini <= 0 or batch % mini:
        raise ConfigError(
            f"data.train_batch_size={batch} is not a multiple of {_ACTOR}.ppo_mini_batch_size={mini}",
            hint="choose both so that a batch is a whole number of mini-batches",
        )
    values["betas"] = tuple(float(b) for b in values["betas"])
    return VerlSettings(**values, unused=unused)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _nearest_key(key: str) -> str:
    exact = [*KEYS, *(p for p in (*LAYOUT, *UNUSED) if "*" not in p)]
    last = key.rpartition(".")[2]
    elsewhere = [k for k in exact if k.rpartition(".")[2] == last]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere else nearest(key, exact)
