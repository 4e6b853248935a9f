"""A verl config for the cluster: verl's own keys and defaults, nothing ignored, nothing left for verl to trip over."""

from __future__ import annotations

import asyncio
import fnmatch
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verl_config import CONFIG, changed, plan

import agl
from agl.errors import ConfigError
from agl.trainer.local.embeddings import ADDED_TOKENS
from agl_verl.adapters import check_tokens
from agl_verl.config.loggers import split
from agl_verl.config.plan import NUMBERS, Plan, flatten, read
from agl_verl.config.shorthand import expand

if sys.version_info >= (3, 13):
    pytest.skip("verl 0.9.1 does not install on Python 3.13 and newer", allow_module_level=True)

pytest.importorskip("hydra", reason="needs verl 0.9.1: pip install 'agl[dev]'")

from omegaconf import DictConfig, OmegaConf

from agl_verl.config import checks, derived, renamed
from agl_verl.config import compose as composing
from agl_verl.config.compose import compose, defaults, notes, verl_schema

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
BRIDGE = {
    "algorithm.adv_estimator": "agl",
    f"{ROLLOUT}.agent.agent_loop_manager_class": "somewhere.Manager",
    "trainer.default_local_dir": "/run",
    "agl.store": "http://127.0.0.1:1",
}

AGENT_LIGHTNING: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_files": "data/train.parquet", "val_files": "data/test.parquet", "train_batch_size": 32,
             "max_prompt_length": 4096, "max_response_length": 2048, "truncation": "error"},
    "actor_rollout_ref": {
        "rollout": {"tensor_model_parallel_size": 1, "n": 4, "log_prob_micro_batch_size_per_gpu": 4,
                    "multi_turn": {"format": "hermes"}, "name": "vllm", "gpu_memory_utilization": 0.8,
                    "engine_kwargs": {"vllm": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}}},
        "actor": {"ppo_mini_batch_size": 32, "ppo_micro_batch_size_per_gpu": 4, "optim": {"lr": 1e-6},
                  "use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_coeff": 0, "clip_ratio_low": 0.2,
                  "clip_ratio_high": 0.3, "fsdp_config": {"param_offload": True, "optimizer_offload": True}},
        "ref": {"log_prob_micro_batch_size_per_gpu": 8, "fsdp_config": {"param_offload": True}},
        "model": {"path": "Qwen/Qwen2.5-Coder-1.5B-Instruct", "use_remove_padding": True,
                  "enable_gradient_checkpointing": True},
    },
    "trainer": {"n_gpus_per_node": 1, "val_before_train": True, "critic_warmup": 0, "logger": ["console", "wandb"],
                "project_name": "AgentLightning", "experiment_name": "spider", "nnodes": 1, "test_freq": 32,
                "total_epochs": 2},
}  # fmt: skip
"""The shape of the configs in Agent Lightning 0.3's examples."""


def short(**common: Any) -> Plan:
    extra = common.pop("config", {})
    return read({**expand({"model": "m", "steps": 3, **common}), **renamed.rename(flatten(extra))})


def validate(config: DictConfig) -> None:
    """verl's own checks of a composed config; they import verl, and load the tokenizer of a critic."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config, need_reference_policy(config), need_critic(config))


def at(config: DictConfig, key: str) -> Any:
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


# -- what people have ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, AGENT_LIGHTNING, {**AGENT_LIGHTNING, "agentlightning": {"port": 9999}}])
def test_configs_of_other_programs_are_taken_as_they_are(config: dict[str, Any]) -> None:
    composed = compose(plan(config), BRIDGE)
    given = dict(renamed.rename(flatten(config)))
    without = derived.find_spec("flash_attn") is None
    for key, value in given.items():
        if not checks.matches(key, checks.UNUSED) and not (without and key == f"{MODEL}.use_remove_padding"):
            assert at(composed, key) == BRIDGE.get(key, value), key
    assert at(composed, f"{ROLLOUT}.agent.agent_loop_manager_class") == "somewhere.Manager"
    tracking, settings = split(given)
    assert agl.VERL(config, backend="local").plan == plan(settings)
    assert tracking.names == (("wandb",) if "wandb" in given["trainer.logger"] else ())


def test_what_has_no_effect_is_named() -> None:
    said = notes(plan({**AGENT_LIGHTNING, "agentlightning": {"port": 9999}}))
    assert {"agentlightning.port", "data.train_files", "data.val_files"} <= set(said)
    assert f"{ROLLOUT}.multi_turn.format" not in said  # it is verl's default
    if derived.find_spec("flash_attn") is None:
        assert f"{MODEL}.use_remove_padding (taken as False)" in said


def test_dotted_keys_and_hydras_plus() -> None:
    dotted = {f"+{k}" if "enable_sleep" in k else k: v for k, v in flatten(AGENT_LIGHTNING).items()}
    dotted[f"++{ROLLOUT}.enable_sleep_mode"] = False
    composed = compose(plan(dotted), {})
    assert at(composed, f"{ROLLOUT}.enable_sleep_mode") is False
    with pytest.raises(ConfigError, match="twice"):
        flatten({"data": {"train_batch_size": 3}, "data.train_batch_size": 4})


def test_a_whole_config_that_hydra_composed() -> None:
    """Of a user's own `@hydra.main`: values that follow others are no wishes of theirs."""
    whole = defaults()
    OmegaConf.update(whole, f"{MODEL}.path", "m")
    OmegaConf.update(whole, f"{ROLLOUT}.name", "vllm")
    OmegaConf.update(whole, f"{ROLLOUT}.n", 4)
    OmegaConf.update(whole, f"{ROLLOUT}.tensor_model_parallel_size", 4)
    OmegaConf.update(whole, "algorithm.adv_estimator", "grpo")
    made = plan(whole)
    composed = compose(made, BRIDGE)
    assert (made.group_size, made.batch_size, at(composed, f"{ACTOR}.use_dynamic_bsz")) == (4, 1024, True)
    OmegaConf.update(whole, f"{ROLLOUT}.response_length", 99)
    with pytest.raises(ConfigError, match=r"set data.max_response_length"):
        compose(plan(whole), {})


# -- verl's own defaults ---------------------------------------------------------------------------------------------

SETTLED = {f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.max_model_len", f"{MODEL}.path",
           f"{ROLLOUT}.val_kwargs.do_sample"}  # fmt: skip


def test_our_defaults_are_verls() -> None:
    known = verl_schema("dp")
    for key, number in NUMBERS.items():
        if key not in SETTLED:
            theirs = known.default(key)
            assert (list(number.default) if isinstance(number.default, tuple) else number.default) == theirs, key


@pytest.mark.parametrize("engine", ["dp", "megatron", "veomni", "torchtitan"])
def test_every_key_that_we_know_is_verls(engine: str) -> None:
    """So that no table outlives a key of verl's."""
    known = verl_schema(engine)
    leaves = set(flatten(known.defaults))
    exact = [
        *NUMBERS,
        *(one.key for one in derived.DEFAULTS),
        *(new for names in renamed.RENAMED.values() for new in names),
    ]
    patterns = [*checks.SUPPORTED, *(k for condition in checks.CONDITIONS for k in condition.keys)]
    exact += [p for p in patterns if "*" not in p] + list(derived.MICRO.values())
    for key in dict.fromkeys(exact):
        if engine == "dp" or not key.endswith(".lr_scheduler_type"):
            known.check(key, "${any}")
    free = ("data.apply_chat_template_kwargs.*", "trainer.v1.sampler.sampler_kwargs.*",
            f"{ROLLOUT}.engine_kwargs.*", f"{ROLLOUT}.engine_kwargs.vllm.*")  # fmt: skip
    for pattern in patterns:
        if "*" in pattern and pattern not in free:
            assert any(fnmatch.fnmatchcase(leaf, pattern) for leaf in leaves), pattern


def test_every_estimator_and_every_loss_of_verl_is_decided_on() -> None:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, AdvantageEstimator

    assert {e.value for e in AdvantageEstimator} == {*checks.ESTIMATORS, *checks.NOT_ESTIMATORS}
    assert set(POLICY_LOSS_REGISTRY) == set(checks.LOSSES)


def test_hydra_is_left_as_it_was() -> None:
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    assert not GlobalHydra.instance().is_initialized()
    defaults()
    assert not GlobalHydra.instance().is_initialized()
    with hydra.initialize_config_module("verl.trainer.config", version_base="1.2"):
        mine = GlobalHydra.instance().hydra
        defaults("megatron")
        assert GlobalHydra.instance().hydra is mine
        assert hydra.compose("ppo_trainer").trainer.use_v1 is True
        assert hydra.version.getbase() is not None


def test_reading_a_config_does_not_import_verl() -> None:
    """Importing it takes seconds and settles the device."""
    code = (
        "import sys\nfrom agl_verl.config.shorthand import expand\n"
        "from agl_verl.config.compose import compose\nfrom agl_verl.config.plan import read\n"
        "plan = read(expand({'model': 'm', 'steps': 2})); compose(plan, {'agl.x': 1})\n"
        "assert not {'verl', 'ray', 'torch'} & set(sys.modules), set(sys.modules) & {'verl', 'ray', 'torch'}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data.train_batchsize", 3, "data.train_batch_size"),
        ("actor_rollout_ref.train_batch_size", 3, "data.train_batch_size"),
        (f"{ACTOR}.ppo_minibatch_size", 3, "ppo_mini_batch_size"),
        (f"{ROLLOUT}.enable_sleepmode", True, "has no key"),
        ("algorithm.rollout_correction.rollout_iss", "token", "rollout_correction.rollout_is"),
        ("nothing.like.it", 1, "it has"),
        ("trainer", 3, "is a section"),
        ("data.gen_batch_size", "16", "of type str; verl takes int"),
        (f"{ACTOR}.shuffle", 1, "of type int; verl takes bool"),
        (f"{ACTOR}.use_torch_compile", "true", "of type str; verl takes bool"),
        (f"{ROLLOUT}.max_num_seqs", 2.5, "of type float; verl takes int"),
        (f"{ACTOR}.checkpoint.save_contents", "model", "of type str; verl takes list"),
        (f"{ACTOR}.optim.lr", "1e-6", "is text; write 1e-06"),
        ("data.train_batch_size", 8.5, "not a whole number"),
        ("trainer.val_before_train", 1, "neither true nor false"),
        ("trainer.v1.trainer_mode", "async", "did you mean"),
        (f"{ACTOR}.strategy", "fsdp3", "did you mean 'fsdp"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size", 2, "strategy='megatron'"),
    ],
)
def test_unknown_keys_and_wrong_types(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(plan(changed(key, value)), {})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("algorithm.adv_estimator", "remax", "greedy rollout"),
        ("algorithm.adv_estimator", "gdpo", "reward functions"),
        ("algorithm.adv_estimator", "optimal_token_baseline", "sums"),
        ("algorithm.adv_estimator", "grpo_vectorized", "use 'grpo'"),
        ("algorithm.adv_estimator", "grppo", "did you mean 'grpo'"),
        ("algorithm.use_kl_in_reward", True, "use_kl_loss"),
        ("algorithm.gamma", 0.9, "credit=agl.credit.Discounted"),
        ("algorithm.lam", 0.9, "gae"),
        ("algorithm.kl_ctrl.kl_coef", 0.1, "use_kl_in_reward"),
        ("algorithm.filter_groups.max_num_gen_batches", 4, "max_inflight_gen_batches"),
        ("algorithm.filter_groups.max_inflight_gen_batches", 4, "filter_groups.enable"),
        ("algorithm.filter_groups.metric", "acc", "use 'reward'"),
        ("algorithm.use_pf_ppo", True, "V1"),
        ("algorithm.rollout_correction.rollout_is_threshold", 4.0, "rollout_correction.rollout_is"),
        ("algorithm.rollout_correction.loss_type", "reinforce", "bypass_mode"),
        ("critic.optim.lr", 1e-5 * 2, "gae"),
        ("critic.enable", True, "gae"),
        ("trainer.critic_warmup", 3, "gae"),
        ("data.custom_cls.path", "x.py", "passed to fit"),
        ("data.filter_overlong_prompts", True, "not prompts yet"),
        ("data.train_max_samples", 10, "give fewer"),
        ("data.truncation", "left", "never cut"),
        ("data.apply_chat_template_kwargs.enable_thinking", False, "template"),
        ("reward.custom_reward_function.path", "x.py", "agent's own reward"),
        ("reward.reward_model.enable", True, "agent's own reward"),
        ("reward_model.enable", True, "agent's own reward"),
        ("custom_reward_function.path", "x.py", "agent's own reward"),
        ("distillation.enabled", True, "no teacher"),
        ("skip.rollout.enable", True, "never replayed"),
        (f"{ROLLOUT}.name", "sglang", "vLLM"),
        (f"{ROLLOUT}.mode", "sync", "no other"),
        (f"{ROLLOUT}.top_p", 0.9, "policy itself"),
        (f"{ROLLOUT}.calculate_log_probs", False, "log-probs"),
        (f"{ROLLOUT}.val_kwargs.n", 4, "run once"),
        (f"{ROLLOUT}.multi_turn.enable", True, "own turns"),
        (f"{ROLLOUT}.multi_turn.max_assistant_turns", 5, "own turns"),
        (f"{ROLLOUT}.agent.agent_loop_manager_class", "x.Y", "bridge"),
        (f"{ROLLOUT}.agent.default_agent_loop", "tool_agent", "own turns"),
        (f"{ROLLOUT}.trace.backend", "mlflow", "agl.explain"),
        (f"{ROLLOUT}.nnodes", 1, "separate_async"),
        (f"{ROLLOUT}.checkpoint_engine.backend", "nccl", "naive"),
        (f"{ROLLOUT}.engine_kwargs.vlm.swap_space", 1, "engine_kwargs.vllm"),
        (f"{ROLLOUT}.response_length", 10, "data.max_response_length"),
        (f"{ACTOR}.kl_loss_type", "full", "low_var_kl"),
        (f"{ACTOR}.loss_scale_factor", 10, "seq-mean-token-sum-norm"),
        (f"{ACTOR}.loss_agg_mode", "mean", "token-mean"),
        (f"{ACTOR}.policy_loss.loss_mode", "gsppo", "did you mean 'gspo'"),
        (f"{ACTOR}.policy_loss.loss_mode", "dro", "dro_beta"),
        (f"{ACTOR}.policy_loss.loss_mode", "sapo", "does not clip"),
        (f"{ACTOR}.policy_loss.clip_cov_ratio", 0.1, "clip_cov"),
        (f"{ACTOR}.tau_pos", 2.0, "sapo"),
        (f"{ACTOR}.optim.total_training_steps", 10, "trainer.total_training_steps"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 3, "does not divide"),
        (f"{MODEL}.lora_alpha", 32, "lora_rank"),
        (f"{MODEL}.custom_chat_template", "x", "template"),
        ("trainer.use_v1", False, "V1 trainer only"),
        ("trainer.val_only", True, "Baseline"),
        ("trainer.esi_redundant_time", 60, "save_freq"),
        ("trainer.resume_mode", "resume_path", "resume=True"),
        ("trainer.device", "npu", "cuda"),
        ("trainer.n_gpus_per_node", 3, "split over"),
        ("trainer.n_gpus_per_node", 0, "no process"),
        ("trainer.v1.sampler.max_off_policy_threshold", 2, "sync"),
        ("trainer.v1.colocate_async.num_warmup_batches", 2, "colocate_async"),
        ("trainer.v1.sampler.sampler_kwargs.x", 2, "custom_sampler"),
        ("trainer.v1.trainer_mode", "separate_async", "do nothing but sample"),
        (f"{ROLLOUT}.tensor_model_parallel_size", 2, "does not divide"),
        (f"{ROLLOUT}.chat_scheduler", "x", "own turns"),
        ("algorithm.rollout_is", True, "rollout_correction"),
        ("trainer.profile_steps", [1], "global_profiler.steps"),
        ("trainer.use_legacy_worker_impl", "enable", "new workers"),
    ],
)
def test_what_would_be_ignored_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(plan(changed(key, value)), {})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "lm_head"], "adapts lm_head"),
        (["model.embed_tokens"], "adapts embed_tokens"),
        (r".*\.(q_proj|embed_in)", "adapts embed_in"),
        (r".*", "adapts embed_tokens"),
        (["q_proj", "o_proj"], None),
        (r".*\.(q_proj|v_proj)", None),
        ("all-linear", None),
    ],
)
def test_adapters_of_embeddings_are_refused(targets: Any, said: str | None) -> None:
    given = short(lora_rank=8, config={f"{MODEL}.target_modules": targets})
    if said is None:
        assert at(compose(given, {}), f"{MODEL}.target_modules") == targets
        return
    with pytest.raises(ConfigError, match=rf"{said}.*\n.*agl.GRPO\(lora=\)"):
        compose(given, {})


def test_adapters_on_tokens_that_a_template_added_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({ADDED_TOKENS: [300, 301]}))
    check_tokens(short(), str(tmp_path))
    check_tokens(short(lora_rank=8), "org/model")
    with pytest.raises(ConfigError, match=r"2 tokens that the chat template added(.|\n)*agl.GRPO\(lora=\)"):
        check_tokens(short(lora_rank=8), str(tmp_path))
    algorithm = agl.VERL(model=str(tmp_path), steps=1, lora_rank=8, backend="local")
    with pytest.raises(ConfigError, match="2 tokens that the chat template added"):
        asyncio.run(algorithm.prepared(algorithm.plan))


def test_a_switch_that_is_off_may_keep_its_numbers() -> None:
    off = {"algorithm.use_kl_in_reward": False, "algorithm.kl_ctrl.kl_coef": 0.5, f"{ACTOR}.use_kl_loss": False,
           f"{ACTOR}.kl_loss_coef": 0.5, "critic.enable": False, "critic.optim.lr": 0.5}  # fmt: skip
    assert at(compose(short(config=off), {}), "critic.optim.lr") == 0.5
    with pytest.raises(ConfigError, match=r"ignore .*kl_loss_coef"):
        compose(short(config={f"{ACTOR}.kl_loss_coef": 0.5}), {})


def test_what_the_bridge_sets_is_not_overruled_in_silence() -> None:
    given = short(config={"transfer_queue.backend.storage_backend": "MooncakeStore", "trainer.logger": ["wandb"]})
    with pytest.raises(ConfigError, match="has to be 'SimpleStorage'"):
        compose(given, {"transfer_queue.backend.storage_backend": "SimpleStorage"})
    with pytest.raises(ConfigError, match=r"did you mean 'trainer.save_freq'"):
        compose(given, {"trainer": {"save_frequency": 1}})
    assert at(compose(given, BRIDGE), "trainer.logger") == ["wandb"]


# -- what is filled in -----------------------------------------------------------------------------------------------


def test_the_common_case() -> None:
    made = short(group_size=4, batch_size=8, learning_rate=2e-6, gpus=2, kl_coef=0.01, lora_rank=8, val_temperature=0.5,
                 offload=True, warmup_steps=3, clip_high=0.28, checkpoint_every=5)  # fmt: skip
    config = compose(made, {})
    expected = {
        f"{MODEL}.path": "m", f"{ROLLOUT}.n": 4, "data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 8,
        f"{ACTOR}.optim.lr": 2e-6, "trainer.n_gpus_per_node": 2, "trainer.total_training_steps": 3,
        f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.01, f"{MODEL}.lora_rank": 8,
        f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.val_kwargs.temperature": 0.5,
        f"{ACTOR}.fsdp_config.param_offload": True, f"{ACTOR}.optim.lr_warmup_steps": 3,
        f"{ACTOR}.clip_ratio_high": 0.28, "trainer.save_freq": 5, "trainer.test_freq": 10,
        f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": 1, f"{ROLLOUT}.max_model_len": 3072,
        f"{ROLLOUT}.response_length": 1024, f"{ACTOR}.use_dynamic_bsz": True,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 16384, "trainer.logger": ["console"], "algorithm.adv_estimator": "grpo",
    }  # fmt: skip
    assert {key: at(config, key) for key in expected} == expected
    assert (made.max_context, made.val_temperature, made.checkpoint_every, made.mode) == (3072, 0.5, 5, "sync")


def test_a_key_beside_the_arguments_counts() -> None:
    made = short(batch_size=8, config={"data": {"train_batch_size": 4}, f"{ACTOR}.clip_ratio": 0.1})
    assert (made.batch_size, made.clip_low, made.clip_high) == (4, 0.1, 0.1)


@pytest.mark.parametrize(
    ("common", "said"),
    [
        ({"groupsize": 4}, "did you mean 'group_size'"),
        ({"steps": 3, "epochs": 2}, "either steps= or epochs="),
        ({"group_size": "8"}, "not a whole number"),
        ({"group_size": 1}, "at least 2"),
        ({"mode": "colocate"}, "did you mean 'colocate_async'"),
        ({"mode": "separate_async"}, "rollout_gpus="),
        ({"gpus": 3}, "split over 3 GPUs"),
        ({"kl_coef": True}, "not a number"),
    ],
)
def test_bad_arguments(common: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(short(**common), {})
    assert said in str(refused.value)


def test_old_names_mean_what_they_meant() -> None:
    made = short(
        gpus=2,
        config={
            f"{ACTOR}.grad_clip": 0.5, f"{ACTOR}.ppo_micro_batch_size": 8, f"{ROLLOUT}.log_prob_micro_batch_size": 16,
            f"{ACTOR}.tis_imp_ratio_cap": 2.5, f"{ACTOR}.optim.warmup_style": "cosine", "ray_init.num_cpus": 7,
            f"{ROLLOUT}.update_weights_bucket_megabytes": 64, "trainer.remove_previous_ckpt_in_save": True,
            "trainer.use_legacy_worker_impl": "disable",
        },
    )  # fmt: skip
    config = compose(made, {})
    expected = {
        f"{ACTOR}.optim.clip_grad": 0.5, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, f"{ACTOR}.use_dynamic_bsz": False,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8, "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 2.5, f"{ACTOR}.optim.lr_scheduler_type": "cosine",
        "ray_kwargs.ray_init.num_cpus": 7, f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 64,
        "trainer.max_actor_ckpt_to_keep": 1,
    }  # fmt: skip
    assert {key: at(config, key) for key in expected} == expected
    assert made.grad_clip == 0.5
    with pytest.raises(ConfigError, match="cannot be split over 2 GPUs"):
        compose(short(gpus=2, config={f"{ACTOR}.ppo_micro_batch_size": 3}), {})


def test_the_bypass_reaches_the_loss() -> None:
    """verl's V1 trainer reads `rollout_correction` from the loss's own section, and nothing copies it there."""
    config = compose(
        short(
            config={
                "algorithm.rollout_correction": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
            }
        ),
        {},
    )
    loss = at(config, f"{ACTOR}.policy_loss")
    assert loss["loss_mode"] == "bypass_mode"
    assert (loss["rollout_correction"]["loss_type"], loss["rollout_correction"]["rollout_is"]) == ("reinforce", "token")
    with pytest.raises(ConfigError, match=r"ignores algorithm.rollout_correction.rollout_is"):
        compose(
            short(
                policy_loss="gspo",
                config={"algorithm.rollout_correction": {"bypass_mode": True, "rollout_is": "token"}},
            ),
            {},
        )


def test_the_constant_of_dr_grpo_does_not_depend_on_micro_batches() -> None:
    config = compose(short(loss_agg="seq-mean-token-sum-norm", max_response_tokens=77), {})
    assert at(config, f"{ACTOR}.loss_scale_factor") == 77


def test_a_critic_takes_the_actors_strategy() -> None:
    config = compose(short(adv_estimator="gae", config={f"{ACTOR}.strategy": "fsdp2"}), {})
    assert at(config, "critic.strategy") == "fsdp2"
    assert at(config, "critic.model.path") == "m"


def test_a_cpu_takes_a_plugin_of_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    with pytest.raises(ConfigError, match="verl needs a GPU") as raised:
        compose(short(device="cpu"), {})
    assert raised.value.hint is not None
    assert "the embedded trainer runs on CPUs" in raised.value.hint
    monkeypatch.setenv("VERL_PLATFORM", "agl-cpu")
    assert at(compose(short(device="cpu"), {}), "trainer.device") == "cpu"


def test_separate_gpus() -> None:
    made = short(mode="separate_async", gpus=2, rollout_gpus=4, tensor_parallel=2)
    config = compose(made, {})
    assert at(config, "trainer.v1.separate_async.parameter_sync_step") == made.minibatches == 4
    assert made.batch_size == 4 * made.mini_batch_size
    assert (at(config, f"{ROLLOUT}.nnodes"), at(config, f"{ROLLOUT}.n_gpus_per_node")) == (1, 4)
    assert at(config, f"{ROLLOUT}.checkpoint_engine.backend") == "nccl"
    steps = short(mode="separate_async", rollout_gpus=1, config={"trainer.v1.separate_async.parameter_sync_step": 2})
    assert (steps.mini_batch_size, at(compose(steps, {}), f"{ACTOR}.ppo_mini_batch_size")) == (8, 8)


# -- verl agrees -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        *({"adv_estimator": name} for name in checks.ESTIMATORS if name != "gae"),
        {"policy_loss": "gspo", "loss_agg": "seq-mean-token-mean"},
        {"policy_loss": "dro", "config": {f"{ACTOR}.policy_loss.dro_beta": 0.1}},
        {"kl_coef": 0.1, "lora_rank": 4},
        {"mode": "colocate_async"},
        {"mode": "separate_async", "rollout_gpus": 2},
        {"gpus": 4, "nodes": 2, "config": {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2}},
        {"config": {"algorithm.rollout_correction": {"bypass_mode": True, "rollout_is": "token"}}},
        {"config": {f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "fp32"}}},
        {"config": {"algorithm.filter_groups": {"enable": True, "max_inflight_gen_batches": 2}}},
    ],
    ids=str,
)
def test_verl_takes_what_we_compose(made: dict[str, Any]) -> None:
    """Its own checks pass, and its dataclasses are made of every section that workers make them of."""
    pytest.importorskip("verl")
    from verl.utils.config import omega_conf_to_dataclass

    config = compose(short(**made), BRIDGE)
    if "lora_rank" not in made or importlib.util.find_spec("vllm"):  # verl asks vLLM for the ranks that it has
        validate(config)
    OmegaConf.resolve(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    algorithm = omega_conf_to_dataclass(config.algorithm)
    assert (actor.rollout_n, rollout.name, algorithm.adv_estimator) == (8, "vllm", "agl")
    assert rollout.agent.agent_loop_manager_class == "somewhere.Manager"


# -- which of the two ------------------------------------------------------------------------------------------------


def test_backends() -> None:
    missing = [m for m in ("verl", "ray", "vllm", "transfer_queue") if importlib.util.find_spec(m) is None]
    assert agl.VERL(CONFIG, backend="local").backend == "local"
    assert agl.VERL(CONFIG).backend == ("local" if missing else "cluster")
    with pytest.raises(ConfigError, match="did you mean 'cluster'"):
        agl.VERL(CONFIG, backend="clusters")  # type: ignore[arg-type]
    if missing:
        with pytest.raises(ConfigError, match=rf"not installed: {', '.join(missing)}\n.*pip install"):
            agl.VERL(CONFIG, backend="cluster")


def test_the_short_form_on_this_machine() -> None:
    from agl_verl.config.local import as_grpo

    algorithm = agl.VERL(model="m", steps=7, group_size=4, learning_rate=1e-4, backend="local", kl_coef=0.1)
    grpo = as_grpo(algorithm.plan, n_tasks=100)
    assert (grpo.model, grpo.steps, grpo.group_size, grpo.batch_size, grpo.minibatches) == ("m", 7, 4, 16, 1)
    assert (grpo.learning_rate, grpo.kl_coef, grpo.val_every, grpo.max_context) == (1e-4, 0.1, 10, 3072)
    with pytest.raises(ConfigError, match="backend='cluster'"):
        agl.VERL(model="m", steps=7, gpus=2, backend="local")
    with pytest.raises(ConfigError, match="neither arguments nor a config"):
        agl.VERL()
    assert composing.OWN == "agl."
