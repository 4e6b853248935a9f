"""Fills in settings that a config leaves out and that have one right value, each with the reason.

All others keep verl's default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from agl.errors import ConfigError
from agl_verl.config.checks import Get
from agl_verl.config.plan import ACTOR, MODEL, ROLLOUT, Plan

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
"""Rows over all GPUs, a key that verl 0.9 lists and no longer reads -> rows of one GPU."""


@dataclass(frozen=True, slots=True)
class Default:
    """A key that gets a value where the config has none.

    Attributes:
        key: dotted.
        value: (plan, get) -> its value; None leaves verl's default.
        reason: why that value is right.
    """

    key: str
    value: Callable[[Plan, Get], Any]
    reason: str


def _micro(plan: Plan, get: Get) -> Any:
    return None if get(f"{ACTOR}.use_dynamic_bsz") else get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")


def _bypass(plan: Plan, get: Get, name: str) -> Any:
    return get(f"{CORRECTION}.{name}") if _bypasses(plan, get) else None


def _bypasses(plan: Plan, get: Get) -> bool:
    return bool(get(f"{CORRECTION}.bypass_mode")) and plan.policy_loss in ("vanilla", "bypass_mode")


def _flash_attention(plan: Plan) -> bool:
    return find_spec("flash_attn") is not None or f"{MODEL}.override_config.attn_implementation" in plan.settings


_ONE_ROLLOUT_ENGINE = "verl has no default, and the cluster samples with vLLM"
_DYNAMIC = "verl has no default; rows of agents differ in length, so tokens fill a GPU better than a number of rows"
_LONGEST = "a row that is longer than a micro-batch cannot be placed"
_AS_ACTOR = "verl has no default; what fits one pass nearly fits the other"
_NO_FLASH = "verl's default needs flash-attn, which is not installed"
_V0 = "verl's V1 trainer reads the correction from the loss alone; its V0 trainer copied it there"

DEFAULTS: tuple[Default, ...] = (
    Default(f"{ROLLOUT}.name", lambda p, get: "vllm", _ONE_ROLLOUT_ENGINE),
    Default(f"{ROLLOUT}.max_model_len", lambda p, get: p.max_context, "verl's is the model's own, often 128k: much KV"),
    Default(f"{ROLLOUT}.tensor_model_parallel_size", lambda p, get: 1, "verl's default, 2, does not fit one GPU"),
    Default(
        f"{ACTOR}.ppo_mini_batch_size", lambda p, get: p.mini_batch_size, "verl's default, 256, may exceed the batch"
    ),
    Default(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        lambda p, get: get(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        _AS_ACTOR,
    ),
    Default(
        f"{ACTOR}.use_dynamic_bsz",
        lambda p, get: True if get(f"{ACTOR}.ppo_micro_batch_size_per_gpu") is None else None,
        _DYNAMIC,
    ),
    Default(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        lambda p, get: max(TOKENS_PER_GPU, p.max_context) if get(f"{ACTOR}.use_dynamic_bsz") else None,
        _LONGEST,
    ),
    Default(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", _micro, _AS_ACTOR),
    Default(f"{REF}.log_prob_micro_batch_size_per_gpu", _micro, _AS_ACTOR),
    Default("critic.ppo_micro_batch_size_per_gpu", _micro, _AS_ACTOR),
    Default("critic.ppo_max_token_len_per_gpu", lambda p, get: max(2 * TOKENS_PER_GPU, p.max_context), _LONGEST),
    Default(
        "critic.model.path",
        lambda p, get: p.model if p.adv_estimator == "gae" else None,
        "verl's default is the model of its example",
    ),
    Default(
        "critic.enable", lambda p, get: None if p.adv_estimator == "gae" else False, "verl warns where it has to guess"
    ),
    Default(
        "critic.strategy",
        lambda p, get: get(f"{ACTOR}.strategy") if p.adv_estimator == "gae" else None,
        "actor and critic share the GPUs",
    ),
    Default(
        f"{MODEL}.override_config.attn_implementation",
        lambda p, get: None if _flash_attention(p) else "sdpa",
        _NO_FLASH,
    ),
    Default(f"{MODEL}.use_remove_padding", lambda p, get: None if _flash_attention(p) else False, _NO_FLASH),
    Default(
        "critic.model.override_config.attn_implementation",
        lambda p, get: get(f"{MODEL}.override_config.attn_implementation"),
        "as the actor",
    ),
    Default("critic.model.use_remove_padding", lambda p, get: get(f"{MODEL}.use_remove_padding"), "as the actor"),
    Default(
        f"{ACTOR}.loss_scale_factor",
        lambda p, get: p.max_response_tokens if p.loss_agg == "seq-mean-token-sum-norm" else None,
        "verl divides by the longest row of a micro-batch, so the loss depends on how rows are dealt out",
    ),
    Default(
        f"{ROLLOUT}.val_kwargs.do_sample",
        lambda p, get: True if p.val_temperature > 0 else None,
        "verl ignores the temperature of a greedy validation",
    ),
    Default("trainer.logger", lambda p, get: ["console"], "verl's default writes to Weights & Biases, with an account"),
    Default(f"{ACTOR}.policy_loss.loss_mode", lambda p, get: "bypass_mode" if _bypasses(p, get) else None, _V0),
    *(
        Default(f"{ACTOR}.policy_loss.rollout_correction.{name}", lambda p, get, name=name: _bypass(p, get, name), _V0)
        for name in (
            "rollout_is",
            "rollout_is_threshold",
            "rollout_is_batch_normalize",
            "rollout_rs",
            "rollout_rs_threshold",
            "loss_type",
            "bypass_mode",
        )
    ),
    Default(
        "trainer.v1.separate_async.parameter_sync_step",
        lambda p, get: p.minibatches if p.mode == "separate_async" else None,
        "verl wants a batch to be that many mini-batches",
    ),
    Default(
        f"{ROLLOUT}.checkpoint_engine.backend",
        lambda p, get: "nccl" if p.mode == "separate_async" and p.device == "cuda" else None,
        "weights go to other GPUs",
    ),
)


def complete(plan: Plan, default: Get) -> dict[str, Any]:
    """The plan's settings, and values for what they leave out.

    Args:
        default: dotted key -> verl's own value.

    Raises:
        ConfigError: micro-batches that GPUs cannot share, or rows that fit into none.
    """
    values = _per_gpu(plan)

    def get(key: str) -> Any:
        return values.get(key, default(key))

    for setting in DEFAULTS:
        if values.get(setting.key) is None and (value := setting.value(plan, get)) is not None:
            values[setting.key] = value
    # The bypass replaces the loss, by the clipped one or by REINFORCE.
    if _bypasses(plan, get):
        values[f"{ACTOR}.policy_loss.loss_mode"] = "bypass_mode"
    if not _flash_attention(plan):
        values[f"{MODEL}.use_remove_padding"] = False
    rows = plan.mini_batch_size * plan.group_size // (plan.gpus * plan.nodes)
    for key in () if get(f"{ACTOR}.use_dynamic_bsz") else MICRO.values():
        micro = get(key)
        if key in plan.settings and isinstance(micro, int) and (micro < 1 or rows % micro):
            raise ConfigError(
                f"{key}={micro} does not divide the {rows} rows that a GPU has of a mini-batch",
                hint=f"choose a divisor, or set {ACTOR}.use_dynamic_bsz",
            )
    tokens = get(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if get(f"{ACTOR}.use_dynamic_bsz") and isinstance(tokens, int) and tokens < plan.max_context:
        raise ConfigError(
            f"{ACTOR}.ppo_max_token_len_per_gpu={tokens} holds no conversation of {plan.max_context} tokens",
            hint=f"raise it, or lower {ROLLOUT}.max_model_len or data.max_prompt_length",
        )
    return values


def _per_gpu(plan: Plan) -> dict[str, Any]:
    """The settings, with micro-batches over all GPUs converted to those of one."""
    gpus = plan.gpus * plan.nodes
    values: dict[str, Any] = {}
    for key, value in plan.settings.items():
        if key not in MICRO:
            values[key] = value
        elif value is not None and MICRO[key] not in plan.settings:
            if not isinstance(value, int) or value % gpus:
                raise ConfigError(
                    f"{key}={value!r} rows cannot be split over {gpus} GPUs", hint=f"give {MICRO[key]}, rows of one"
                )
            values[MICRO[key]] = value // gpus
    if all(values.get(key) is None for key in MICRO.values()):
        values.pop(f"{ACTOR}.use_dynamic_bsz", None)  # without either, verl does not start
    return values
