"""What a config leaves out although one value is plainly right, each with the reason; the rest is verl's default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from agl.errors import ConfigError
from agl.trainer.verl.config.plan import ACTOR, MODEL, ROLLOUT, Plan

REF = "actor_rollout_ref.ref"
CORRECTION = "algorithm.rollout_correction"
TOKENS_PER_GPU = 16384
"""verl's own `ppo_max_token_len_per_gpu`."""

MICRO = {
    f"{ACTOR}.ppo_micro_batch_size": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size": f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{REF}.log_prob_micro_batch_size": f"{REF}.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
}
"""Rows over all GPUs, which verl 0.9 lists and no longer reads -> rows of one GPU."""

Get = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Filled:
    """A key that gets a value where none was given.

    Attributes:
        key: dotted. why: the value is right.
        value: (plan, get) -> it; None leaves verl's default.
    """

    key: str
    value: Callable[[Plan, Get], Any]
    why: str


def _micro(plan: Plan, get: Get) -> Any:
    return None if get(f"{ACTOR}.use_dynamic_bsz") else get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")


def _bypass(plan: Plan, get: Get, name: str) -> Any:
    return get(f"{CORRECTION}.{name}") if _bypassing(plan, get) else None


def _bypassing(plan: Plan, get: Get) -> bool:
    return bool(get(f"{CORRECTION}.bypass_mode")) and plan.policy_loss in ("vanilla", "bypass_mode")


def _flash_attention(plan: Plan) -> bool:
    return find_spec("flash_attn") is not None or f"{MODEL}.override_config.attn_implementation" in plan.given


_ONE_ROLLOUT_ENGINE = "verl has no default, and the cluster samples with vLLM"
_DYNAMIC = "verl has no default; rows of agents differ in length, so tokens fill a GPU better than a number of rows"
_LONGEST = "a row that is longer than a micro-batch cannot be placed"
_AS_ACTOR = "verl has no default; what fits one pass fits the other, or nearly"
_NO_FLASH = "verl's default needs flash-attn, which is not installed"
_V0_DID = "verl's V1 trainer reads the correction from the loss alone; its V0 trainer copied it there"

FILLED: tuple[Filled, ...] = (
    Filled(f"{ROLLOUT}.name", lambda p, get: "vllm", _ONE_ROLLOUT_ENGINE),
    Filled(f"{ROLLOUT}.max_model_len", lambda p, get: p.max_context, "verl's is the model's own, often 128k: much KV"),
    Filled(f"{ROLLOUT}.tensor_model_parallel_size", lambda p, get: 1, "verl's default, 2, does not fit one GPU"),
    Filled(f"{ACTOR}.ppo_mini_batch_size", lambda p, get: p.mini_batch_size, "verl's default, 256, may pass the batch"),
    Filled(f"{ACTOR}.strategy", lambda p, get: "fsdp2" if p.device == "cpu" else None, "FSDP1 needs an accelerator"),
    Filled(f"{ACTOR}.ppo_micro_batch_size_per_gpu",
           lambda p, get: get(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"), _AS_ACTOR),
    Filled(f"{ACTOR}.use_dynamic_bsz",
           lambda p, get: True if get(f"{ACTOR}.ppo_micro_batch_size_per_gpu") is None else None, _DYNAMIC),
    Filled(f"{ACTOR}.ppo_max_token_len_per_gpu",
           lambda p, get: max(TOKENS_PER_GPU, p.max_context) if get(f"{ACTOR}.use_dynamic_bsz") else None, _LONGEST),
    Filled(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", _micro, _AS_ACTOR),
    Filled(f"{REF}.log_prob_micro_batch_size_per_gpu", _micro, _AS_ACTOR),
    Filled("critic.ppo_micro_batch_size_per_gpu", _micro, _AS_ACTOR),
    Filled("critic.ppo_max_token_len_per_gpu", lambda p, get: max(2 * TOKENS_PER_GPU, p.max_context), _LONGEST),
    Filled("critic.model.path", lambda p, get: p.model if p.estimator == "gae" else None,
           "verl's default is a model of its own example"),
    Filled("critic.enable", lambda p, get: None if p.estimator == "gae" else False, "verl warns where it has to guess"),
    Filled("critic.strategy", lambda p, get: get(f"{ACTOR}.strategy") if p.estimator == "gae" else None,
           "actor and critic share the GPUs"),
    Filled(f"{MODEL}.override_config.attn_implementation",
           lambda p, get: None if _flash_attention(p) else "sdpa", _NO_FLASH),
    Filled(f"{MODEL}.use_remove_padding", lambda p, get: None if _flash_attention(p) else False, _NO_FLASH),
    Filled("critic.model.override_config.attn_implementation",
           lambda p, get: get(f"{MODEL}.override_config.attn_implementation"), "as the actor"),
    Filled("critic.model.use_remove_padding", lambda p, get: get(f"{MODEL}.use_remove_padding"), "as the actor"),
    Filled(f"{ACTOR}.loss_scale_factor",
           lambda p, get: p.max_response_tokens if p.loss_agg == "seq-mean-token-sum-norm" else None,
           "verl divides by the longest row of a micro-batch, so the loss depends on how rows are dealt out"),
    Filled(f"{ROLLOUT}.val_kwargs.do_sample", lambda p, get: True if p.val_temperature > 0 else None,
           "verl ignores the temperature of a greedy validation"),
    Filled("trainer.logger", lambda p, get: ["console"], "verl's default writes to Weights & Biases, with an account"),
    Filled(f"{ACTOR}.policy_loss.loss_mode", lambda p, get: "bypass_mode" if _bypassing(p, get) else None, _V0_DID),
    *(Filled(f"{ACTOR}.policy_loss.rollout_correction.{name}",
             lambda p, get, name=name: _bypass(p, get, name), _V0_DID)
      for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs",
                   "rollout_rs_threshold", "loss_type", "bypass_mode")),
    Filled("trainer.v1.separate_async.parameter_sync_step",
           lambda p, get: p.minibatches if p.mode == "separate_async" else None,
           "verl wants a batch to be that many mini-batches"),
    Filled(f"{ROLLOUT}.checkpoint_engine.backend",
           lambda p, get: "nccl" if p.mode == "separate_async" and p.device == "cuda" else None,
           "weights go to other GPUs"),
)  # fmt: skip


def filled(plan: Plan, default: Callable[[str], Any]) -> dict[str, Any]:
    """`plan.given`, and what is to be set beside it.

    Args:
        default: dotted key -> verl's own value.

    Raises:
        ConfigError: micro-batches that GPUs cannot share, or rows that fit into none.
    """
    values = _per_gpu(plan)

    def get(key: str) -> Any:
        return values.get(key, default(key))

    for one in FILLED:
        if values.get(one.key) is None and (value := one.value(plan, get)) is not None:
            values[one.key] = value
    # The bypass takes the loss over: it is the clipped one, or REINFORCE.
    if _bypassing(plan, get):
        values[f"{ACTOR}.policy_loss.loss_mode"] = "bypass_mode"
    if not _flash_attention(plan):
        values[f"{MODEL}.use_remove_padding"] = False
    rows = plan.mini_batch_size * plan.group_size // (plan.gpus_per_node * plan.nodes)
    for key in () if get(f"{ACTOR}.use_dynamic_bsz") else MICRO.values():
        micro = get(key)
        if key in plan.given and isinstance(micro, int) and (micro < 1 or rows % micro):
            raise ConfigError(
                f"{key}={micro} does not divide the {rows} rows that a GPU has of a mini-batch",
                hint=f"choose a divisor, or set {ACTOR}.use_dynamic_bsz",
            )
    room = get(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if get(f"{ACTOR}.use_dynamic_bsz") and isinstance(room, int) and room < plan.max_context:
        raise ConfigError(
            f"{ACTOR}.ppo_max_token_len_per_gpu={room} holds no conversation of {plan.max_context} tokens",
            hint=f"raise it, or lower {ROLLOUT}.max_model_len or data.max_prompt_length",
        )
    return values


def _per_gpu(plan: Plan) -> dict[str, Any]:
    """What was given, with micro-batches over all GPUs as those of one."""
    gpus = plan.gpus_per_node * plan.nodes
    values: dict[str, Any] = {}
    for key, value in plan.given.items():
        if key not in MICRO:
            values[key] = value
        elif value is not None and MICRO[key] not in plan.given:
            if not isinstance(value, int) or value % gpus:
                raise ConfigError(
                    f"{key}={value!r} rows cannot be dealt out to {gpus} GPUs", hint=f"give {MICRO[key]}, rows of one"
                )
            values[MICRO[key]] = value // gpus
    if all(values.get(key) is None for key in MICRO.values()):
        values.pop(f"{ACTOR}.use_dynamic_bsz", None)  # without either, verl does not start
    return values
