"""The arguments of `agl.VERL(model=...)` as keys of verl's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from agl.errors import ConfigError, nearest
from agl.trainer.verl.config.plan import ACTOR, MODEL, ROLLOUT


class Common(TypedDict, total=False):
    """What most runs set; everything else goes into `config=`, by verl's own keys.

    Attributes:
        model: a Hugging Face directory or hub id.
        steps: updates; or `epochs`: passes over the training tasks.
        group_size: rollouts per task (8). batch_size: tasks per step (16). mini_batch_size: tasks per optimiser step
            (`batch_size`). update_epochs: passes over a step's rows (1).
        learning_rate, warmup_steps, weight_decay, grad_clip: of AdamW (1e-6, 0, 0.01, 1.0).
        adv_estimator: verl's name ("grpo"). normalize_std: divide by the group's standard deviation (True).
        policy_loss, loss_agg: verl's `loss_mode` ("vanilla") and `loss_agg_mode` ("token-mean").
        clip_low, clip_high: of the importance ratio (0.2). kl_coef: weight of the KL loss towards the initial policy
            (0: none). entropy_coef: bonus (0).
        temperature: of training (1.0). val_temperature: of validation (greedy).
        max_prompt_tokens, max_response_tokens: of one call (2048, 1024). max_context: of a conversation (both).
        val_every, checkpoint_every: in steps (10; 50). val_before_train: whether there is a validation first (True).
        gpus, nodes: that train, per node (1), and how many (1). tensor_parallel: GPUs per vLLM server (1).
        gpu_memory: part of a GPU's memory that vLLM takes (0.5). offload: parameters and optimiser wait in the
            machine's memory while vLLM samples (False).
        lora_rank, lora_alpha: train adapters instead of the full weights.
        mode: "sync"; "colocate_async" (the next batch is sampled while this one ends); "separate_async" (GPUs of their
            own sample all the time). rollout_gpus, rollout_nodes: those GPUs, for "separate_async" alone.
        device: "cuda" or "cpu".
        seed: of the order of tasks.
    """

    model: str
    steps: int
    epochs: int
    group_size: int
    batch_size: int
    mini_batch_size: int
    update_epochs: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    grad_clip: float
    adv_estimator: str
    normalize_std: bool
    policy_loss: str
    loss_agg: str
    clip_low: float
    clip_high: float
    kl_coef: float
    entropy_coef: float
    temperature: float
    val_temperature: float
    max_prompt_tokens: int
    max_response_tokens: int
    max_context: int
    val_every: int
    val_before_train: bool
    checkpoint_every: int
    gpus: int
    nodes: int
    tensor_parallel: int
    gpu_memory: float
    offload: bool
    lora_rank: int
    lora_alpha: float
    mode: Literal["sync", "colocate_async", "separate_async"]
    rollout_gpus: int
    rollout_nodes: int
    device: Literal["cuda", "cpu"]
    seed: int


KEYS: Mapping[str, tuple[str, ...]] = {
    "model": (f"{MODEL}.path",),
    "steps": ("trainer.total_training_steps",),
    "epochs": ("trainer.total_epochs",),
    "group_size": (f"{ROLLOUT}.n",),
    "batch_size": ("data.train_batch_size",),
    "mini_batch_size": (f"{ACTOR}.ppo_mini_batch_size",),
    "update_epochs": (f"{ACTOR}.ppo_epochs",),
    "learning_rate": (f"{ACTOR}.optim.lr",),
    "warmup_steps": (f"{ACTOR}.optim.lr_warmup_steps",),
    "weight_decay": (f"{ACTOR}.optim.weight_decay",),
    "grad_clip": (f"{ACTOR}.optim.clip_grad",),
    "adv_estimator": ("algorithm.adv_estimator",),
    "normalize_std": ("algorithm.norm_adv_by_std_in_grpo",),
    "policy_loss": (f"{ACTOR}.policy_loss.loss_mode",),
    "loss_agg": (f"{ACTOR}.loss_agg_mode",),
    "clip_low": (f"{ACTOR}.clip_ratio_low",),
    "clip_high": (f"{ACTOR}.clip_ratio_high",),
    "kl_coef": (f"{ACTOR}.kl_loss_coef",),
    "entropy_coef": (f"{ACTOR}.entropy_coeff",),
    "temperature": (f"{ROLLOUT}.temperature",),
    "val_temperature": (f"{ROLLOUT}.val_kwargs.temperature",),
    "max_prompt_tokens": ("data.max_prompt_length",),
    "max_response_tokens": ("data.max_response_length",),
    "max_context": (f"{ROLLOUT}.max_model_len",),
    "val_every": ("trainer.test_freq",),
    "val_before_train": ("trainer.val_before_train",),
    "checkpoint_every": ("trainer.save_freq",),
    "gpus": ("trainer.n_gpus_per_node",),
    "nodes": ("trainer.nnodes",),
    "tensor_parallel": (f"{ROLLOUT}.tensor_model_parallel_size",),
    "gpu_memory": (f"{ROLLOUT}.gpu_memory_utilization",),
    "offload": (f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload"),
    "lora_rank": (f"{MODEL}.lora_rank",),
    "lora_alpha": (f"{MODEL}.lora_alpha",),
    "mode": ("trainer.v1.trainer_mode",),
    "rollout_gpus": (f"{ROLLOUT}.n_gpus_per_node",),
    "rollout_nodes": (f"{ROLLOUT}.nnodes",),
    "device": ("trainer.device",),
    "seed": ("data.seed",),
}
"""Argument -> the keys that it sets."""

DEFAULTS: Common = {
    "group_size": 8,
    "batch_size": 16,
    "adv_estimator": "grpo",
    "max_prompt_tokens": 2048,
    "max_response_tokens": 1024,
    "val_every": 10,
    "checkpoint_every": 50,
    "gpus": 1,
    "tensor_parallel": 1,
}
"""Where the common case is not verl's default, which is a job of eight GPUs on its own example."""


def expand(common: Common) -> dict[str, Any]:
    """The keys that the arguments stand for, with the common case's defaults where `model` is among them.

    Raises:
        ConfigError: an unknown argument, both or neither of steps and epochs, or arguments that go without `model`.
    """
    for name in common:
        if name not in KEYS:
            raise ConfigError(
                f"VERL has no option {name!r}", hint=f"{nearest(name, KEYS)}; verl's own keys go into config="
            )
    values: dict[str, Any] = {**(DEFAULTS if "model" in common else {}), **common}
    if "model" in common and ("steps" in common) == ("epochs" in common):
        raise ConfigError("VERL(model=...) needs either steps= or epochs=", hint="for example steps=200")
    keys = {key: value for name, value in values.items() for key in KEYS[name]}
    if "kl_coef" in common:
        keys[f"{ACTOR}.use_kl_loss"] = bool(common["kl_coef"])
    if common.get("val_temperature"):
        keys[f"{ROLLOUT}.val_kwargs.do_sample"] = True
    if "rollout_gpus" in common and "rollout_nodes" not in common:
        keys[f"{ROLLOUT}.nnodes"] = 1
    return keys
