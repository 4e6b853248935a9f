"""The arguments of `agl.VERL(model=...)` as keys of verl's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

from agl.errors import ConfigError, nearest
from agl_verl.config.plan import ACTOR, MODEL, ROLLOUT


class Common(TypedDict, total=False):
    """What most runs set, each with the keys of verl's that it stands for; `config=` takes verl's other keys.

    Attributes:
        model: a Hugging Face directory or hub id, or a GGUF file.
        steps: updates; or `epochs`: passes over the training tasks.
        group_size: rollouts per task (8).
        batch_size: tasks per step (16).
        mini_batch_size: tasks per optimiser step
            (`batch_size`). update_epochs: passes over a step's rows (1).
        learning_rate, warmup_steps, weight_decay, grad_clip: settings of AdamW (1e-6, 0, 0.01, 1.0).
        adv_estimator: verl's name ("grpo").
        normalize_std: divide by the group's standard deviation (True).
        policy_loss, loss_agg: verl's `loss_mode` ("vanilla") and `loss_agg_mode` ("token-mean").
        clip_low, clip_high: bounds of the importance ratio (0.2).
        kl_coef: weight of the KL loss towards the initial
            policy (0: none). entropy_coef: bonus (0).
        temperature: in training (1.0).
        val_temperature: in validation (greedy).
        max_prompt_tokens, max_response_tokens: limits of one call (2048, 1024).
        max_context: limit of a conversation
            (their sum).
        val_every, checkpoint_every: in steps (10; 50).
        val_before_train: whether to validate first (True).
        gpus: per node that trains (1).
        nodes: that train (1); both for each policy.
        tensor_parallel: GPUs per vLLM
            server (1).
        gpu_memory: part of a GPU's memory that vLLM takes (0.5).
        offload: keep parameters and optimiser in the
            machine's memory while vLLM samples (False).
        share_prefixes: compute tokens that rows begin with alike once, with FSDP and without a critic (False).
        lora_rank, lora_alpha: train adapters instead of the full weights.
        mode: "sync"; "colocate_async" (the next batch is sampled while this one ends); "separate_async" (separate GPUs
            sample all the time). rollout_gpus, rollout_nodes: those GPUs, for "separate_async" alone.
        device: "cuda"; "cpu" with backend="local" alone, since verl needs a GPU.
        seed: fixes the order of tasks.
    """

    model: Annotated[str, f"{MODEL}.path"]
    steps: Annotated[int, "trainer.total_training_steps"]
    epochs: Annotated[int, "trainer.total_epochs"]
    group_size: Annotated[int, f"{ROLLOUT}.n"]
    batch_size: Annotated[int, "data.train_batch_size"]
    mini_batch_size: Annotated[int, f"{ACTOR}.ppo_mini_batch_size"]
    update_epochs: Annotated[int, f"{ACTOR}.ppo_epochs"]
    learning_rate: Annotated[float, f"{ACTOR}.optim.lr"]
    warmup_steps: Annotated[int, f"{ACTOR}.optim.lr_warmup_steps"]
    weight_decay: Annotated[float, f"{ACTOR}.optim.weight_decay"]
    grad_clip: Annotated[float, f"{ACTOR}.optim.clip_grad"]
    adv_estimator: Annotated[str, "algorithm.adv_estimator"]
    normalize_std: Annotated[bool, "algorithm.norm_adv_by_std_in_grpo"]
    policy_loss: Annotated[str, f"{ACTOR}.policy_loss.loss_mode"]
    loss_agg: Annotated[str, f"{ACTOR}.loss_agg_mode"]
    clip_low: Annotated[float, f"{ACTOR}.clip_ratio_low"]
    clip_high: Annotated[float, f"{ACTOR}.clip_ratio_high"]
    kl_coef: Annotated[float, f"{ACTOR}.kl_loss_coef"]
    entropy_coef: Annotated[float, f"{ACTOR}.entropy_coeff"]
    temperature: Annotated[float, f"{ROLLOUT}.temperature"]
    val_temperature: Annotated[float, f"{ROLLOUT}.val_kwargs.temperature"]
    max_prompt_tokens: Annotated[int, "data.max_prompt_length"]
    max_response_tokens: Annotated[int, "data.max_response_length"]
    max_context: Annotated[int, f"{ROLLOUT}.max_model_len"]
    val_every: Annotated[int, "trainer.test_freq"]
    val_before_train: Annotated[bool, "trainer.val_before_train"]
    checkpoint_every: Annotated[int, "trainer.save_freq"]
    gpus: Annotated[int, "trainer.n_gpus_per_node"]
    nodes: Annotated[int, "trainer.nnodes"]
    tensor_parallel: Annotated[int, f"{ROLLOUT}.tensor_model_parallel_size"]
    gpu_memory: Annotated[float, f"{ROLLOUT}.gpu_memory_utilization"]
    offload: Annotated[bool, f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload"]
    share_prefixes: Annotated[bool, f"{ACTOR}.use_prefix_grouper"]
    lora_rank: Annotated[int, f"{MODEL}.lora_rank"]
    lora_alpha: Annotated[float, f"{MODEL}.lora_alpha"]
    mode: Annotated[Literal["sync", "colocate_async", "separate_async"], "trainer.v1.trainer_mode"]
    rollout_gpus: Annotated[int, f"{ROLLOUT}.n_gpus_per_node"]
    rollout_nodes: Annotated[int, f"{ROLLOUT}.nnodes"]
    device: Annotated[Literal["cuda", "cpu"], "trainer.device"]
    seed: Annotated[int, "data.seed"]


KEYS: Mapping[str, tuple[str, ...]] = {
    name: hint.__metadata__ for name, hint in get_type_hints(Common, include_extras=True).items()
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
"""Where the common case differs from verl's default, which is a job of eight GPUs on its own example."""


def expand(common: Common) -> dict[str, Any]:
    """verl's keys for these arguments, with the defaults of the common case where `model` is among them.

    Raises:
        ConfigError: an unknown argument, both or neither of steps and epochs, or arguments that go without `model`.
    """
    for name in common:
        if name not in KEYS:
            hint = f"{nearest(name, KEYS)}; verl's own keys go into config="
            if name == "quantize":
                hint = "leave it out, or train on one GPU with agl.GRPO(quantize=)"
            raise ConfigError(f"VERL has no option {name!r}", hint=hint)
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
