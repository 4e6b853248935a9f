"""What of verl's config would be ignored on the cluster, by verl itself or because agents and rewards come from agl."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agl.errors import ConfigError, nearest
from agl.trainer.verl.config.plan import ACTOR, MODEL, ROLLOUT, Plan

PER_CALL = ("grpo", "rloo")
"""Estimators that agl computes, from the returns of calls; verl's own ones see rows and their rewards."""

ESTIMATORS = (*PER_CALL, "gae", "grpo_passk", "gpg", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")

NOT_ESTIMATORS: Mapping[str, str] = {
    "remax": "it needs a greedy rollout of each task beside the sampled ones, and verl's V1 trainer makes none; "
    "use 'rloo'",
    "gdpo": "it reads its rewards from verl's reward functions, and the agent's rewards are used; "
    "use 'grpo', with rewards by name added up by the credit rule",
    "grpo_vectorized": "it is 'grpo', which agl computes for every call; use 'grpo'",
    "rloo_vectorized": "it is 'rloo', which agl computes for every call; use 'rloo'",
    "optimal_token_baseline": "verl's V1 trainer does not pass on the sums that it needs; use 'grpo' or 'rloo'",
    "tir_optimal_token_baseline": "verl's V1 trainer does not pass on the sums that it needs; use 'grpo' or 'rloo'",
}

LOSSES: Mapping[str, tuple[str, ...]] = {
    "vanilla": (), "gspo": (), "gpg": (), "geo_mean": (), "cispo": (), "dppo_tv": (), "dppo_kl": (), "bypass_mode": (),
    "sapo": (f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg"),
    "clip_cov": (f"{ACTOR}.policy_loss.clip_cov_*",),
    "kl_cov": (f"{ACTOR}.policy_loss.kl_cov_ratio", f"{ACTOR}.policy_loss.ppo_kl_coef"),
    "dro": (f"{ACTOR}.policy_loss.dro_beta",),
}  # fmt: skip
"""verl's policy losses and the keys that each alone reads."""

CLIPPED = ("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov", "bypass_mode")
DUAL_CLIPPED = ("vanilla", "dppo_tv", "dppo_kl", "bypass_mode")
OWN_MEAN = ("sapo", "geo_mean")
"""Losses that read `clip_ratio_low` and `_high`; `clip_ratio_c`; and those that do not read `loss_agg_mode`."""

_OWN_REWARD = "the agent's own reward is used: reward= of agl.wrap, a returned value, or agl.emit_reward"
_OWN_TURNS = "the agent runs its own turns and tools"
_OWN_TASKS = "the tasks are those given to fit()"
_RENDERED = "the gateway renders prompts by the template in the model's directory: put it there"
_SAMPLED_AS_IS = "training samples from the policy itself; leave it out"
_MANAGER = "the bridge is what verl asks for rollouts; leave it out"
_SET_BY_TRAINER = "verl sets it from trainer.total_training_steps; leave it out"

ONLY: Mapping[str, tuple[tuple[Any, ...] | None, str]] = {
    "algorithm.use_pf_ppo": ((False,), "it draws rows anew, and verl's V1 trainer writes advantages back to the old"),
    "algorithm.filter_groups.metric": (("reward",), "groups are told apart by their rewards: use 'reward'"),
    "algorithm.filter_groups.max_num_gen_batches": ((0,), "verl ignores it: use max_inflight_gen_batches"),
    "critic.enable": ((None, False), "a critic comes with algorithm.adv_estimator='gae', and with no other"),
    "custom_reward_function.*": ((None,), _OWN_REWARD),
    "data.custom_cls.*": ((None,), _OWN_TASKS),
    "data.filter_overlong_prompts": ((False,), "a task is no prompt yet: a call with too long a one is refused"),
    "data.*_max_samples": ((-1,), f"{_OWN_TASKS}: give fewer"),
    "data.truncation": (("error",), "a prompt is never cut: the agent gets an error"),
    "data.tokenizer": ((None,), "the tokenizer is the model's"),
    "data.apply_chat_template_kwargs.*": ((), _RENDERED),
    "distillation.*": ((), "there is no teacher on this path"),
    "reward.custom_reward_function.path": ((None,), _OWN_REWARD),
    "reward.reward_manager.*": ((), _OWN_REWARD),
    "reward.reward_model.*": ((), _OWN_REWARD),
    "reward.sandbox_fusion.*": ((), _OWN_REWARD),
    "reward_model.*": ((None, False, "naive"), _OWN_REWARD),
    "sandbox_fusion.*": ((None,), _OWN_REWARD),
    "skip.*": ((), "rollouts are the agent's, never a recording of earlier ones"),
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
    f"{ROLLOUT}.calculate_log_probs": ((True,), "training needs the log-probs that the sampler gave"),
    f"{ROLLOUT}.logprobs_mode": (("processed_logprobs",), "training needs the log-probs that were sampled from"),
    f"{ROLLOUT}.top_p": ((1.0,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.top_k": ((-1, 0), _SAMPLED_AS_IS),
    f"{ROLLOUT}.do_sample": ((True,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.ignore_eos": ((False,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.repetition_penalty": ((1.0,), _SAMPLED_AS_IS),
    f"{ROLLOUT}.over_sample_rate": ((0,), "verl's SGLang alone reads it"),
    f"{ROLLOUT}.prompt_length": ((), "set data.max_prompt_length"),
    f"{ROLLOUT}.response_length": ((), "set data.max_response_length"),
    f"{ROLLOUT}.val_kwargs.n": ((1,), "each validation task is run once"),
    f"{ROLLOUT}.val_kwargs.top_p": ((1.0,), "leave it out"),
    f"{ROLLOUT}.val_kwargs.top_k": ((-1, 0), "leave it out"),
    f"{ROLLOUT}.multi_turn.format": (("hermes",), "the gateway reads tool calls as the model's renderer says"),
    f"{ROLLOUT}.multi_turn.*": ((None, False), _OWN_TURNS),
    f"{ROLLOUT}.agent.agent_loop_manager_class": ((None,), _MANAGER),
    f"{ROLLOUT}.agent.default_agent_loop": (("single_turn_agent",), _OWN_TURNS),
    f"{ROLLOUT}.agent.agent_loop_config_path": ((None,), _OWN_TURNS),
    f"{ROLLOUT}.agent.custom_async_server.*": ((None,), _MANAGER),
    f"{ROLLOUT}.trace.*": ((None, False), "agl traces every rollout: see agl.explain and `agl export`"),
    f"{ROLLOUT}.engine_kwargs.vllm.*": (None, ""),
    f"{ROLLOUT}.engine_kwargs.*": ((), "the cluster samples with vLLM: use engine_kwargs.vllm"),
    "trainer.device": (("cuda", "cpu"), "use 'cuda', or 'cpu' for a tiny model"),
    "trainer.use_v1": ((True,), "verl's older trainer is going away, and the bridge does not know it"),
    "trainer.val_only": ((False,), "use agl.Baseline() or Trainer.dev"),
    "trainer.esi_redundant_time": ((0,), "verl's V1 trainer ignores it: set trainer.save_freq"),
    "trainer.resume_mode": (("auto", "disable"), "go on with trainer.fit(resume=True)"),
    "trainer.resume_from_path": ((None, False), "go on with trainer.fit(resume=True)"),
}  # fmt: skip
"""Dotted key -> the values that count (verl's default always does; None: all do), and what to do about another."""

UNUSED: tuple[str, ...] = (
    "agentlightning.*", "data.train_files", "data.val_files", "data.val_batch_size", "data.*_key", "data.return_*",
    "data.*_kwargs.*", "data.image_patch_size", "data.use_shm", "data.filter_overlong_prompts_workers",
    "data.dataloader_num_workers", "data.validation_shuffle", "data.trust_remote_code", "data.*tool*_path",
    "reward.num_workers", "reward_model.*", f"{ROLLOUT}.agent.num_workers", f"{ROLLOUT}.multi_turn.format",
    f"{ROLLOUT}.engine_kwargs.vllm.enable_auto_tool_choice", f"{ROLLOUT}.engine_kwargs.vllm.tool_call_parser",
    f"{ROLLOUT}.skip_tokenizer_init", f"{ROLLOUT}.prometheus.served_model_name",
    "trainer.default_local_dir", "trainer.resume_mode", "trainer.resume_from_path", "transfer_queue.enable",
)  # fmt: skip
"""What has no counterpart here, or what a run settles itself; the note names those that were given."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Keys that count under a condition alone.

    Attributes:
        keys: patterns. met: whether they count. say: what to set for them to count.
        switch: a key that says itself, when given, that they are off: then they may stand there.
    """

    keys: tuple[str, ...]
    met: Callable[[Plan, Callable[[str], Any]], bool]
    say: str
    switch: str | None = None


CONDITIONS: tuple[Needs, ...] = (
    Needs(("algorithm.norm_adv_by_std_in_grpo",), lambda p, get: p.estimator in ("grpo", "grpo_passk"),
          "algorithm.adv_estimator='grpo' divides by the standard deviation, the one chosen does not"),
    Needs(("algorithm.gamma",), lambda p, get: p.estimator in ("gae", "reinforce_plus_plus"),
          "the chosen adv_estimator has no discount; discount calls by credit=agl.credit.Discounted(...)"),
    Needs(("algorithm.lam",), lambda p, get: p.estimator == "gae", "algorithm.adv_estimator='gae' alone reads it"),
    Needs(("algorithm.kl_penalty", "algorithm.kl_ctrl.*"), lambda p, get: get("algorithm.use_kl_in_reward"),
          "set algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward"),
    Needs(("algorithm.filter_groups.*",), lambda p, get: get("algorithm.filter_groups.enable"),
          "set algorithm.filter_groups.enable", "algorithm.filter_groups.enable"),
    Needs(("algorithm.filter_groups.max_inflight_gen_batches",), lambda p, get: p.mode == "sync",
          "the asynchronous modes refill at once; leave it out"),
    Needs(("algorithm.pf_ppo.*",), lambda p, get: False, "algorithm.use_pf_ppo is not there; leave it out",
          "algorithm.use_pf_ppo"),
    Needs(("algorithm.rollout_correction.rollout_is_*",),
          lambda p, get: get("algorithm.rollout_correction.rollout_is") is not None,
          "set algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is"),
    Needs(("algorithm.rollout_correction.rollout_rs_threshold",),
          lambda p, get: get("algorithm.rollout_correction.rollout_rs") is not None,
          "set algorithm.rollout_correction.rollout_rs", "algorithm.rollout_correction.rollout_rs"),
    Needs(("algorithm.rollout_correction.loss_type",),
          lambda p, get: get("algorithm.rollout_correction.bypass_mode"),
          "set algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.bypass_mode"),
    Needs(("critic.*", "trainer.critic_warmup"), lambda p, get: p.estimator == "gae",
          "algorithm.adv_estimator='gae' alone has a critic", "critic.enable"),
    Needs((f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"), lambda p, get: get(f"{ACTOR}.use_kl_loss"),
          f"set {ACTOR}.use_kl_loss", f"{ACTOR}.use_kl_loss"),
    Needs((f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"), lambda p, get: p.policy_loss in CLIPPED,
          "the chosen loss does not clip the ratio; leave it out"),
    Needs((f"{ACTOR}.clip_ratio_c",), lambda p, get: p.policy_loss in DUAL_CLIPPED,
          "the chosen loss has no dual clip; leave it out"),
    Needs((f"{ACTOR}.loss_agg_mode",), lambda p, get: p.policy_loss not in OWN_MEAN,
          "the chosen loss has a mean of its own; leave it out"),
    Needs((f"{ACTOR}.loss_scale_factor",), lambda p, get: p.loss_agg == "seq-mean-token-sum-norm",
          f"{ACTOR}.loss_agg_mode='seq-mean-token-sum-norm' alone divides by it"),
    Needs((f"{MODEL}.lora_alpha", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules"),
          lambda p, get: p.lora_rank > 0 or get(f"{MODEL}.lora.rank"), f"set {MODEL}.lora_rank", f"{MODEL}.lora_rank"),
    Needs((f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node", "actor_rollout_ref.hybrid_engine"),
          lambda p, get: p.mode == "separate_async",
          "trainer.v1.trainer_mode='separate_async' alone has GPUs that do nothing but sample"),
    Needs((f"{ROLLOUT}.checkpoint_engine.backend",), lambda p, get: p.mode == "separate_async",
          "where training and sampling share GPUs, verl takes 'naive'; leave it out"),
    Needs(("trainer.v1.sampler.max_off_policy_*",), lambda p, get: p.mode != "sync",
          "trainer.v1.trainer_mode='sync' samples every step from the newest weights; leave it out"),
    Needs(("trainer.v1.sampler.sync_refill_failed_groups",), lambda p, get: p.mode == "sync",
          "the asynchronous modes always refill; leave it out"),
    Needs(("trainer.v1.sampler.sampler_kwargs.*",), lambda p, get: get("trainer.v1.sampler.custom_sampler.path"),
          "set trainer.v1.sampler.custom_sampler"),
    *(Needs((f"trainer.v1.{mode}.*",), lambda p, get, m=mode: p.mode == m, f"set trainer.v1.trainer_mode='{mode}'")
      for mode in ("colocate_async", "separate_async")),
    *(Needs(keys, lambda p, get, loss=loss: p.policy_loss == loss, f"set {ACTOR}.policy_loss.loss_mode='{loss}'")
      for loss, keys in LOSSES.items() if keys),
)  # fmt: skip


def check(plan: Plan, default: Callable[[str], Any]) -> None:
    """Refuse what would be ignored.

    Args:
        default: dotted key -> verl's own value.

    Raises:
        ConfigError: a value that would be ignored, with why and what to do instead.
    """
    given = plan.given

    def get(key: str) -> Any:
        return given.get(key, default(key))

    _check_choices(plan, get)
    for key, value in given.items():
        if value == default(key) and type(value) is type(default(key)):
            continue
        only = next((only for pattern, only in ONLY.items() if fnmatch.fnmatchcase(key, pattern)), None)
        if only is not None and only[0] is not None and value not in only[0]:
            raise ConfigError(f"{key}={value!r} cannot be honoured", hint=only[1])
        for needs in CONDITIONS:
            if matches(key, needs.keys) and needs.switch not in (key, *given) and not needs.met(plan, get):
                raise ConfigError(f"verl would ignore {key}={value!r}", hint=needs.say)
    _check_sizes(plan, get)


def _check_choices(plan: Plan, get: Callable[[str], Any]) -> None:
    """The estimator, the loss, and what goes with them."""
    if plan.estimator not in ESTIMATORS:
        why = NOT_ESTIMATORS.get(plan.estimator) or nearest(plan.estimator, ESTIMATORS)
        raise ConfigError(f"algorithm.adv_estimator={plan.estimator!r} cannot be honoured", hint=why)
    if plan.estimator == "gae" and get("critic.enable") is False:
        raise ConfigError(
            "algorithm.adv_estimator='gae' without a critic", hint="leave out critic.enable, or use 'grpo'"
        )
    if plan.estimator in (*PER_CALL, "grpo_passk") and plan.group_size < 2:
        raise ConfigError(
            f"{ROLLOUT}.n={plan.group_size}, so no rollout has another to be compared with",
            hint="use at least 2; 8 is usual",
        )
    if plan.estimator in PER_CALL and get("algorithm.use_kl_in_reward"):
        raise ConfigError(
            f"algorithm.use_kl_in_reward with {plan.estimator!r}: advantages come from the calls' returns, so a KL in "
            "verl's rewards would be lost",
            hint=f"use {ACTOR}.use_kl_loss",
        )
    if plan.policy_loss not in LOSSES:
        raise ConfigError(
            f"{ACTOR}.policy_loss.loss_mode={plan.policy_loss!r} is not known", hint=nearest(plan.policy_loss, LOSSES)
        )
    beta = get(f"{ACTOR}.policy_loss.dro_beta")
    if plan.policy_loss == "dro" and not (beta and beta > 0):
        raise ConfigError(
            f"the loss 'dro' needs {ACTOR}.policy_loss.dro_beta above 0", hint="it weighs the squared log-ratio"
        )
    correction = "algorithm.rollout_correction"
    bypassing = get(f"{correction}.bypass_mode")
    if bypassing and plan.policy_loss not in ("vanilla", "bypass_mode"):
        own = [k for k in ("rollout_is", "rollout_rs") if get(f"{correction}.{k}") is not None]
        own += ["loss_type"] if get(f"{correction}.loss_type") != "ppo_clip" else []
        if own:
            raise ConfigError(
                f"{correction}.bypass_mode with the loss {plan.policy_loss!r} ignores {correction}.{own[0]}",
                hint=f"leave out {ACTOR}.policy_loss.loss_mode or bypass_mode",
            )


def _check_sizes(plan: Plan, get: Callable[[str], Any]) -> None:
    """What must divide what, as verl asserts in the middle of its start."""
    gpus = plan.gpus_per_node * plan.nodes
    if gpus < 1:
        raise ConfigError(
            f"trainer.n_gpus_per_node={plan.gpus_per_node} and trainer.nnodes={plan.nodes} make no process that trains",
            hint="use 1 of each; with trainer.device='cpu' they count processes",
        )
    parallel = get(f"{ROLLOUT}.tensor_model_parallel_size") if _given(plan, "tensor_model_parallel_size") else 1
    pool = gpus
    if plan.mode == "separate_async":
        pool = get(f"{ROLLOUT}.nnodes") * (plan.given.get(f"{ROLLOUT}.n_gpus_per_node") or plan.gpus_per_node)
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
            f"a mini-batch of {plan.mini_batch_size} tasks with {plan.group_size} rollouts each cannot be dealt out to "
            f"{gpus} GPUs",
            hint=f"choose {ACTOR}.ppo_mini_batch_size * {ROLLOUT}.n as a multiple of the GPUs that train",
        )
    if plan.device == "cpu" and (plan.given.get(f"{ACTOR}.strategy", "fsdp2") != "fsdp2"):
        raise ConfigError(f"{ACTOR}.strategy={get(f'{ACTOR}.strategy')!r} does not run on a CPU", hint="use 'fsdp2'")


def _given(plan: Plan, name: str) -> bool:
    return f"{ROLLOUT}.{name}" in plan.given


def matches(key: str, patterns: tuple[str, ...]) -> bool:
    """Whether a key is one of these, or under one that ends in an asterisk."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
