"""Refuses settings of a verl config without effect, in verl itself or because agents and rewards come from agl.

The cluster and this machine both refuse what is in `SHARED`; what this machine refuses in addition is in `local`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from agl.errors import ConfigError, nearest
from agl_verl import sharing
from agl_verl.adapters import check_targets
from agl_verl.config.plan import ACTOR, MODEL, ROLLOUT, Plan

T = TypeVar("T")
Get = Callable[[str], Any]
"""Dotted key -> its value, verl's own where the config has none."""
Supported = tuple[tuple[Any, ...] | None, str]
"""The values that count (None: all do), and a hint for any other value."""

PER_CALL = ("grpo", "rloo")
"""Estimators that agl computes, from the returns of calls; verl's own see rows and their rewards."""

ESTIMATORS = (*PER_CALL, "gae", "grpo_passk", "gpg", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")

NOT_ESTIMATORS: Mapping[str, str] = {
    "remax": "it needs a greedy rollout of each task next to the sampled ones, and verl's V1 trainer makes none; "
    "use 'rloo'",
    "gdpo": "it reads its rewards from verl's reward functions, and the agent's rewards are used; "
    "use 'grpo', with rewards by name added up by the credit rule",
    "grpo_vectorized": "agl computes 'grpo' per call; use 'grpo'",
    "rloo_vectorized": "agl computes 'rloo' per call; use 'rloo'",
    "optimal_token_baseline": "verl's V1 trainer does not pass on the sums that it needs; use 'grpo' or 'rloo'",
    "tir_optimal_token_baseline": "verl's V1 trainer does not pass on the sums that it needs; use 'grpo' or 'rloo'",
}

LOSSES: Mapping[str, tuple[str, ...]] = {
    "vanilla": (),
    "gspo": (),
    "gpg": (),
    "geo_mean": (),
    "cispo": (),
    "dppo_tv": (),
    "dppo_kl": (),
    "bypass_mode": (),
    "sapo": (f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg"),
    "clip_cov": (f"{ACTOR}.policy_loss.clip_cov_*",),
    "kl_cov": (f"{ACTOR}.policy_loss.kl_cov_ratio", f"{ACTOR}.policy_loss.ppo_kl_coef"),
    "dro": (f"{ACTOR}.policy_loss.dro_beta",),
}
"""verl's policy losses and the keys that each alone reads."""

CLIPPED = ("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov", "bypass_mode")
DUAL_CLIPPED = ("vanilla", "dppo_tv", "dppo_kl", "bypass_mode")
OWN_MEAN = ("sapo", "geo_mean")
"""Losses that read `clip_ratio_low` and `_high`; `clip_ratio_c`; and those that do not read `loss_agg_mode`."""

_OWN_REWARD = "the agent's own reward is used: reward= of agl.wrap, a returned value, or agl.emit_reward"
_OWN_TURNS = "the agent runs its own turns and tools"
_OWN_TASKS = "the tasks are those passed to fit()"
_RENDERED = "the gateway renders prompts by the template in the model's directory: put it there"
_SAMPLED_AS_IS = "training samples from the policy itself; leave it out"
_MANAGER = "verl requests rollouts from the bridge; leave it out"
_RESUME = "resume with trainer.fit(resume=True)"
_SET_BY_TRAINER = "verl sets it from trainer.total_training_steps; leave it out"

SHARED: Mapping[str, Supported] = {
    "data.truncation": (("error",), "a prompt is never cut: the agent gets an error"),
    f"{ROLLOUT}.top_p": ((1.0,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.top_k": ((-1, 0), _SAMPLED_AS_IS),
    f"{ROLLOUT}.do_sample": ((True,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.ignore_eos": ((False,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.val_kwargs.n": ((1,), "each validation task is run once"),
    f"{ROLLOUT}.val_kwargs.top_p": ((1.0,), "leave it out"),
    f"{ROLLOUT}.val_kwargs.top_k": ((-1, 0), "leave it out"),
    "trainer.val_only": ((False,), "use agl.Baseline() or Trainer.dev"),
    "trainer.resume_mode": (("auto", "disable"), _RESUME),
    "trainer.resume_from_path": ((None, False), _RESUME),
}
"""Settings that both the cluster and this machine restrict: dotted key -> supported values."""

SHARED_UNUSED = (
    "agentlightning.*",
    "data.train_files",
    "data.val_files",
    "data.val_batch_size",
    "data.*_key",
    "data.return_*",
    "reward_model.*",
    "trainer.default_local_dir",
)
"""Keys that have no effect on either."""

SUPPORTED: Mapping[str, Supported] = {
    **SHARED,
    "algorithm.use_pf_ppo": ((False,), "it draws rows again, and verl's V1 trainer writes advantages to the old"),
    "algorithm.filter_groups.metric": (("reward",), "groups are distinguished by their rewards: use 'reward'"),
    "algorithm.filter_groups.max_num_gen_batches": ((0,), "verl ignores it: use max_inflight_gen_batches"),
    "critic.enable": ((None, False), "a critic comes with algorithm.adv_estimator='gae', and with no other"),
    "custom_reward_function.*": ((None,), _OWN_REWARD),
    "data.custom_cls.*": ((None,), _OWN_TASKS),
    "data.filter_overlong_prompts": ((False,), "tasks are not prompts yet; a call whose prompt is too long is refused"),
    "data.*_max_samples": ((-1,), f"{_OWN_TASKS}: give fewer"),
    "data.tokenizer": ((None,), "the tokenizer is the model's"),
    "data.apply_chat_template_kwargs.*": ((), _RENDERED),
    "distillation.*": ((), "there is no teacher on this path"),
    "reward.custom_reward_function.path": ((None,), _OWN_REWARD),
    "reward.reward_manager.*": ((), _OWN_REWARD),
    "reward.reward_model.*": ((), _OWN_REWARD),
    "reward.sandbox_fusion.*": ((), _OWN_REWARD),
    "reward_model.*": ((None, False, "naive"), _OWN_REWARD),
    "sandbox_fusion.*": ((None,), _OWN_REWARD),
    "skip.*": ((), "rollouts always run the agent; earlier ones are never replayed"),
    f"{MODEL}.custom_chat_template": ((None,), _RENDERED),
    f"{MODEL}.tokenizer_path": ((None,), "the tokenizer is the model's"),
    f"{ACTOR}.rollout_n": ((), f"set {ROLLOUT}.n"),
    f"{ACTOR}.optim.total_training_steps": ((), _SET_BY_TRAINER),
    f"{ACTOR}.kl_loss_type": (
        ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"),
        "verl has no code for 'full'; use 'low_var_kl'",
    ),
    f"{ACTOR}.loss_agg_mode": (
        ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        "use verl's default, 'token-mean'",
    ),
    "actor_rollout_ref.ref.rollout_n": ((), f"set {ROLLOUT}.n"),
    "critic.rollout_n": ((), f"set {ROLLOUT}.n"),
    "critic.optim.total_training_steps": ((), _SET_BY_TRAINER),
    f"{ROLLOUT}.name": (("vllm",), "the cluster samples with vLLM"),
    f"{ROLLOUT}.mode": (("async",), "verl 0.9 has no other; leave it out"),
    f"{ROLLOUT}.calculate_log_probs": ((True,), "training needs the sampler's log-probs"),
    f"{ROLLOUT}.logprobs_mode": (("processed_logprobs",), "training needs the log-probs that were sampled from"),
    f"{ROLLOUT}.repetition_penalty": ((1.0,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.over_sample_rate": ((0,), "verl's SGLang alone reads it"),
    f"{ROLLOUT}.prompt_length": ((), "set data.max_prompt_length"),
    f"{ROLLOUT}.response_length": ((), "set data.max_response_length"),
    f"{ROLLOUT}.multi_turn.format": (("hermes",), "the model's renderer determines how the gateway reads tool calls"),
    f"{ROLLOUT}.multi_turn.*": ((None, False), _OWN_TURNS),
    f"{ROLLOUT}.agent.agent_loop_manager_class": ((None,), _MANAGER),
    f"{ROLLOUT}.agent.default_agent_loop": (("single_turn_agent",), _OWN_TURNS),
    f"{ROLLOUT}.agent.agent_loop_config_path": ((None,), _OWN_TURNS),
    f"{ROLLOUT}.agent.custom_async_server.*": ((None,), _MANAGER),
    f"{ROLLOUT}.trace.*": ((None, False), "agl traces every rollout: see agl.explain and `agl export`"),
    f"{ROLLOUT}.engine_kwargs.vllm.*": (None, ""),
    f"{ROLLOUT}.engine_kwargs.*": ((), "the cluster samples with vLLM: use engine_kwargs.vllm"),
    "trainer.use_v1": ((True,), "the bridge supports verl's V1 trainer only"),
    "trainer.esi_redundant_time": ((0,), "verl's V1 trainer ignores it: set trainer.save_freq"),
}
"""Dotted key, or a pattern of keys -> supported values; verl's default is always one of them."""


UNUSED: tuple[str, ...] = (
    *SHARED_UNUSED,
    "data.*_kwargs.*",
    "data.image_patch_size",
    "data.use_shm",
    "data.filter_overlong_prompts_workers",
    "data.dataloader_num_workers",
    "data.validation_shuffle",
    "data.trust_remote_code",
    "data.*tool*_path",
    "reward.num_workers",
    f"{ROLLOUT}.agent.num_workers",
    f"{ROLLOUT}.multi_turn.format",
    f"{ROLLOUT}.engine_kwargs.vllm.enable_auto_tool_choice",
    f"{ROLLOUT}.engine_kwargs.vllm.tool_call_parser",
    f"{ROLLOUT}.skip_tokenizer_init",
    f"{ROLLOUT}.prometheus.served_model_name",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "transfer_queue.enable",
)
"""Keys without a counterpart here, or that a run sets itself; a note names those that the config has."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Keys that have an effect only under a condition.

    Attributes:
        keys: patterns.
        met: (plan, get) -> whether they have an effect.
        hint: what to set so that they do.
        switch: a key that turns them off; where the config has it, their values may stay.
    """

    keys: tuple[str, ...]
    met: Callable[[Plan, Get], Any]
    hint: str
    switch: str | None = None


def _behind(switch: str, *keys: str) -> Condition:
    """The condition that `switch` is on."""
    return Condition(keys, lambda p, get: get(switch) not in (None, False), f"set {switch}", switch)


_CORRECTION = "algorithm.rollout_correction"
CONDITIONS: tuple[Condition, ...] = (
    _behind("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
    _behind("algorithm.filter_groups.enable", "algorithm.filter_groups.*"),
    _behind(f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_is_*"),
    _behind(f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"),
    _behind(f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.loss_type"),
    _behind(f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
    Condition(
        ("algorithm.norm_adv_by_std_in_grpo",),
        lambda p, get: p.adv_estimator in ("grpo", "grpo_passk"),
        "algorithm.adv_estimator='grpo' divides by the standard deviation, the one chosen does not",
    ),
    Condition(
        ("algorithm.gamma",),
        lambda p, get: p.adv_estimator in ("gae", "reinforce_plus_plus"),
        "the chosen adv_estimator has no discount; discount calls by credit=agl.credit.Discounted(...)",
    ),
    Condition(
        ("algorithm.lam",), lambda p, get: p.adv_estimator == "gae", "algorithm.adv_estimator='gae' alone reads it"
    ),
    Condition(
        ("algorithm.filter_groups.max_inflight_gen_batches",),
        lambda p, get: p.mode == "sync",
        "the asynchronous modes refill at once; leave it out",
    ),
    Condition(
        ("algorithm.pf_ppo.*",),
        lambda p, get: False,
        "algorithm.use_pf_ppo is not there; leave it out",
        "algorithm.use_pf_ppo",
    ),
    Condition(
        ("critic.*", "trainer.critic_warmup"),
        lambda p, get: p.adv_estimator == "gae",
        "algorithm.adv_estimator='gae' alone has a critic",
        "critic.enable",
    ),
    Condition(
        (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
        lambda p, get: p.policy_loss in CLIPPED,
        "the chosen loss does not clip the ratio; leave it out",
    ),
    Condition(
        (f"{ACTOR}.clip_ratio_c",),
        lambda p, get: p.policy_loss in DUAL_CLIPPED,
        "the chosen loss has no dual clip; leave it out",
    ),
    Condition(
        (f"{ACTOR}.loss_agg_mode",),
        lambda p, get: p.policy_loss not in OWN_MEAN,
        "the chosen loss computes its own mean; leave it out",
    ),
    Condition(
        (f"{ACTOR}.loss_scale_factor",),
        lambda p, get: p.loss_agg == "seq-mean-token-sum-norm",
        f"{ACTOR}.loss_agg_mode='seq-mean-token-sum-norm' alone divides by it",
    ),
    Condition(
        (f"{MODEL}.lora_alpha", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules"),
        lambda p, get: p.lora_rank > 0 or get(f"{MODEL}.lora.rank"),
        f"set {MODEL}.lora_rank",
        f"{MODEL}.lora_rank",
    ),
    Condition(
        (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node", "actor_rollout_ref.hybrid_engine"),
        lambda p, get: p.mode == "separate_async",
        "trainer.v1.trainer_mode='separate_async' alone has GPUs that do nothing but sample",
    ),
    Condition(
        (f"{ROLLOUT}.checkpoint_engine.backend",),
        lambda p, get: p.mode == "separate_async",
        "where training and sampling share GPUs, verl takes 'naive'; leave it out",
    ),
    Condition(
        ("trainer.v1.sampler.max_off_policy_*",),
        lambda p, get: p.mode != "sync",
        "trainer.v1.trainer_mode='sync' samples every step from the newest weights; leave it out",
    ),
    Condition(
        ("trainer.v1.sampler.sync_refill_failed_groups",),
        lambda p, get: p.mode == "sync",
        "the asynchronous modes always refill; leave it out",
    ),
    Condition(
        ("trainer.v1.sampler.sampler_kwargs.*",),
        lambda p, get: get("trainer.v1.sampler.custom_sampler.path"),
        "set trainer.v1.sampler.custom_sampler",
    ),
    *(
        Condition(
            (f"trainer.v1.{mode}.*",), lambda p, get, m=mode: p.mode == m, f"set trainer.v1.trainer_mode='{mode}'"
        )
        for mode in ("colocate_async", "separate_async")
    ),
    *(
        Condition(keys, lambda p, get, loss=loss: p.policy_loss == loss, f"set {ACTOR}.policy_loss.loss_mode='{loss}'")
        for loss, keys in LOSSES.items()
        if keys
    ),
)


def check(plan: Plan, default: Get) -> None:
    """Refuse what would be ignored.

    Args:
        default: dotted key -> verl's own value.

    Raises:
        ConfigError: a value that would be ignored, with the reason and what to do instead.
    """
    settings = plan.settings
    # verl loads other platforms as plug-ins, which its own variable names.
    if plan.device != "cuda" and not os.environ.get("VERL_PLATFORM"):
        raise ConfigError(
            f"trainer.device={plan.device!r} cannot be honoured on the cluster: verl needs a GPU ('cuda')",
            hint="the embedded trainer runs on CPUs: agl.GRPO(device='cpu'), or agl.VERL(..., backend='local'); for "
            "other accelerators, install their plug-in of verl and name it in VERL_PLATFORM",
        )

    def get(key: str) -> Any:
        return settings.get(key, default(key))

    _check_choices(plan, get)
    _check_sharing(plan)
    check_targets(plan)
    for key, value in settings.items():
        if value == default(key) and type(value) is type(default(key)):
            continue
        values, hint = first_match(key, SUPPORTED) or (None, "")
        if values is not None and value not in values:
            raise ConfigError(f"{key}={value!r} cannot be honoured", hint=hint)
        for condition in CONDITIONS:
            switched = condition.switch in (key, *settings)
            if matches(key, condition.keys) and not switched and not condition.met(plan, get):
                raise ConfigError(f"verl would ignore {key}={value!r}", hint=condition.hint)
    _check_sizes(plan, get)


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Whether a key fits one of these patterns, where an asterisk stands for any text."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def first_match(key: str, table: Mapping[str, T]) -> T | None:
    """The value of the first pattern in `table` that a key fits."""
    return next((value for pattern, value in table.items() if fnmatch.fnmatchcase(key, pattern)), None)


def _check_choices(plan: Plan, get: Get) -> None:
    """Check the estimator and the loss, and the settings that depend on them."""
    if plan.adv_estimator not in ESTIMATORS:
        hint = NOT_ESTIMATORS.get(plan.adv_estimator) or nearest(plan.adv_estimator, ESTIMATORS)
        raise ConfigError(f"algorithm.adv_estimator={plan.adv_estimator!r} cannot be honoured", hint=hint)
    if plan.adv_estimator == "gae" and get("critic.enable") is False:
        raise ConfigError(
            "algorithm.adv_estimator='gae' without a critic", hint="leave out critic.enable, or use 'grpo'"
        )
    if plan.adv_estimator in (*PER_CALL, "grpo_passk") and plan.group_size < 2:
        raise ConfigError(
            f"{ROLLOUT}.n={plan.group_size}, so there is nothing to compare a rollout with",
            hint="use at least 2; 8 is usual",
        )
    if plan.adv_estimator in PER_CALL and get("algorithm.use_kl_in_reward"):
        raise ConfigError(
            f"algorithm.use_kl_in_reward with {plan.adv_estimator!r}: advantages come from the calls' returns, so a KL "
            "in verl's rewards would be lost",
            hint=f"use {ACTOR}.use_kl_loss",
        )
    if plan.policy_loss not in LOSSES:
        raise ConfigError(
            f"{ACTOR}.policy_loss.loss_mode={plan.policy_loss!r} is not known", hint=nearest(plan.policy_loss, LOSSES)
        )
    beta = get(f"{ACTOR}.policy_loss.dro_beta")
    if plan.policy_loss == "dro" and not (beta and beta > 0):
        raise ConfigError(
            f"the loss 'dro' needs {ACTOR}.policy_loss.dro_beta above 0", hint="it weights the squared log-ratio"
        )
    bypass = get(f"{_CORRECTION}.bypass_mode")
    if bypass and plan.policy_loss not in ("vanilla", "bypass_mode"):
        ignored = [k for k in ("rollout_is", "rollout_rs") if get(f"{_CORRECTION}.{k}") is not None]
        ignored += ["loss_type"] if get(f"{_CORRECTION}.loss_type") != "ppo_clip" else []
        if ignored:
            raise ConfigError(
                f"{_CORRECTION}.bypass_mode with the loss {plan.policy_loss!r} ignores {_CORRECTION}.{ignored[0]}",
                hint=f"leave out {ACTOR}.policy_loss.loss_mode or bypass_mode",
            )


def _check_sharing(plan: Plan) -> None:
    """Check that shared prefixes can be computed once where that is wanted."""
    critic = "algorithm.adv_estimator='gae': a critic's micro-batches are whole rows"
    why = (critic if plan.adv_estimator == "gae" else sharing.obstacle(plan)) if sharing.shares(plan) else ""
    if why:
        raise ConfigError(
            f"share_prefixes ({sharing.SWITCH}) cannot be honoured with {why}", hint="change that, or leave it out"
        )


def _check_sizes(plan: Plan, get: Get) -> None:
    """Check that sizes divide each other where verl asserts it in the middle of its start."""
    gpus = plan.gpus * plan.nodes
    if gpus < 1:
        raise ConfigError(
            f"trainer.n_gpus_per_node={plan.gpus} and trainer.nnodes={plan.nodes} leave no process to train",
            hint="use 1 of each",
        )
    parallel = plan.settings.get(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    pool = gpus
    if plan.mode == "separate_async":
        pool = get(f"{ROLLOUT}.nnodes") * (plan.settings.get(f"{ROLLOUT}.n_gpus_per_node") or plan.gpus)
        if pool < 1:
            raise ConfigError(
                "trainer.v1.trainer_mode='separate_async' needs GPUs that do nothing but sample",
                hint=f"set {ROLLOUT}.nnodes and {ROLLOUT}.n_gpus_per_node, or rollout_gpus=",
            )
    if pool % parallel:
        raise ConfigError(
            f"{ROLLOUT}.tensor_model_parallel_size={parallel} does not divide {pool} GPUs", hint="use a divisor, or 1"
        )
    rows = plan.mini_batch_size * plan.group_size
    if rows % gpus:
        raise ConfigError(
            f"a mini-batch of {plan.mini_batch_size} tasks with {plan.group_size} rollouts each cannot be split over "
            f"{gpus} GPUs",
            hint=f"choose {ACTOR}.ppo_mini_batch_size * {ROLLOUT}.n as a multiple of the GPUs that train",
        )
