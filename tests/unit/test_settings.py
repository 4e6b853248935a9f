"""An algorithm's settings reach the policy process: no field is lost on the way, and none is read that nothing sets."""

from __future__ import annotations

import inspect
import pydoc
import re
from dataclasses import fields
from typing import Any

import pytest

import agl
from agl.errors import ConfigError
from agl.trainer.algorithms import groups, settings
from agl.trainer.algorithms.policy_gradient import PolicyGradient
from agl.trainer.local import protocol
from agl.trainer.local.config import (
    LearnerConfig,
    LoraSpec,
    LossSettings,
    OptimizerSettings,
    PassSettings,
    ProcessSettings,
)
from agl.trainer.local.policy import PolicySpec, environment

OWN = {
    "group_size", "batch_size", "steps", "epochs", "adv_estimator", "baseline_decay", "normalize_std",
    "dynamic_sampling", "max_gen_batches", "task_sampling", "overlong", "temperature", "max_response_tokens",
    "val_temperature", "val_every", "val_before_train", "renderer", "chat_template", "prompts", "checkpoint_every",
}  # fmt: skip
"""Settings of the algorithm that the policy process does not know by that name."""
DERIVED = {"critic", "total_steps", "loss_scale_factor", "seed"}
"""The learner's settings that follow from others."""
DEFAULTS = {"dual_clip", "share_prefixes", "beta"}
"""The learner's settings that no policy gradient changes; `beta` is of `agl.DPO`."""
OF_THE_RUN = {"name", "seed", "learner", "trained", "usual_rate"}
"""What a policy process has from elsewhere than the algorithm's fields of the same name."""


def names(kind: type) -> set[str]:
    return {f.name for f in fields(kind)}


def test_every_setting_is_on_both_sides_or_accounted_for() -> None:
    algorithm, learner, spec = names(PolicyGradient), names(LearnerConfig), names(PolicySpec)
    assert algorithm - learner - spec == OWN
    assert learner - algorithm == DERIVED | DEFAULTS
    assert spec - algorithm == OF_THE_RUN


def test_a_setting_of_the_policy_process_is_declared_once() -> None:
    """An algorithm, its groups, the learner and the policy process share declarations: type and default."""
    shared = (OptimizerSettings, LossSettings, PassSettings, ProcessSettings)
    for kind in (groups.Optimizer, groups.Device, groups.Loss, settings.TrainingSettings, LearnerConfig, PolicySpec):
        for base in shared:
            assert not names(base) & inspect.get_annotations(kind).keys(), f"{kind.__name__} declares again"


def test_settings_of_the_same_name_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "require", lambda *_: None)  # as where vLLM is installed
    monkeypatch.setattr(protocol, "require", lambda *_: None)  # and bitsandbytes
    changed = {
        "learning_rate": 0.5, "warmup_steps": 3, "schedule": "linear", "betas": (0.5, 0.6), "weight_decay": 0.1,
        "grad_clip": 2.0, "clip_low": 0.11, "clip_high": 0.12, "max_kl": 0.9, "kl_coef": 0.2, "kl_kind": "k1",
        "entropy_coef": 0.3,
        "loss_agg": "seq-mean-token-sum", "gamma": 0.9, "lam": 0.8, "value_coef": 0.7, "value_clip": 0.6,
        "value_learning_rate": 0.4, "policy_loss": "gspo", "rollout_is": "token", "rollout_is_threshold": 3.0,
        "minibatches": 2, "max_tokens_per_microbatch": 77, "autocast": "bfloat16",
        "activation_checkpointing": True,
    }  # fmt: skip
    process = {"model": "m", "device": "cpu", "dtype": "float32", "attention": "sdpa", "lora": LoraSpec(rank=2),
               "max_context": 9, "threads": 2, "max_batch": 5, "max_staleness": 1, "engine": "vllm",
               "gpu_memory": 0.3, "load_timeout": 9.0}  # fmt: skip
    shared = names(PolicyGradient) & (names(LearnerConfig) | names(PolicySpec)) - {"update_epochs"}
    assert changed.keys() | process.keys() == shared - {"quantize", "data_parallel"}  # vLLM has none
    spec = agl.GRPO(**changed, **process, steps=50, update_epochs=4).policy_spec(seed=6, steps=50)  # type: ignore[arg-type]
    assert {name: getattr(spec.learner, name) for name in changed} == changed
    assert {name: getattr(spec, name) for name in process} == process
    assert agl.GRPO(model="m", steps=1, lora=LoraSpec(), quantize="4bit").policy_spec(0, 1).quantize == "4bit"
    assert agl.GRPO(model="m", steps=1, data_parallel=3).policy_spec(0, 1).data_parallel == 3
    assert (spec.seed, spec.learner.seed, spec.learner.update_epochs, spec.learner.total_steps) == (6, 6, 4, 50)


@pytest.mark.parametrize(
    "algorithm", [agl.GRPO, agl.DrGRPO, agl.RLOO, agl.REINFORCE, agl.REINFORCEPlusPlus, agl.PPO, agl.GSPO, agl.DAPO]
)
def test_derived_settings_follow_the_algorithm(algorithm: type[PolicyGradient]) -> None:
    made = algorithm(model="m", steps=5, max_response_tokens=32)
    learner = made.policy_spec(seed=0, steps=5).learner
    assert learner.critic == (made.adv_estimator == "gae") == (algorithm is agl.PPO)
    assert learner.loss_scale_factor == (32.0 if algorithm is agl.DrGRPO else None)
    assert (learner.total_steps, learner.update_epochs) == (None, made.update_epochs)


@pytest.mark.parametrize("name", ["loss_agg", "policy_loss", "schedule", "kl_kind", "autocast", "attention"])
def test_a_choice_that_does_not_exist_is_refused_where_it_is_written(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){name}='flash' is not known.*-> "):
        agl.GRPO(model="m", steps=1, **{name: "flash"})


@pytest.mark.parametrize("value", [0, -1, "two"])
def test_a_number_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"gateways is {value!r}"):
        agl.Trainer(agl.GRPO(model="m", steps=1), gateways=value)


def test_a_warm_up_that_is_longer_than_one_step_with_epochs() -> None:
    """How many steps the epochs are is known later, with the data."""
    agl.GRPO(model="m", epochs=2, warmup_steps=20, schedule="linear")


def test_the_threads_of_a_policy_are_the_callers_where_none_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert environment(None)["OMP_NUM_THREADS"] == "2"
    assert environment(3)["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert int(environment(None)["OMP_NUM_THREADS"]) >= 1


def test_groups_hold_the_rare_settings() -> None:
    shown = inspect.signature(agl.GRPO).parameters
    assert len(shown) <= 20
    assert [name for name in shown if name in groups.GROUPS] == ["optimizer", "sampling", "device", "loss"]
    rare = [f.name for kind in groups.GROUPS.values() for f in fields(kind)]
    assert len(rare) == len(set(rare))
    assert {*shown} | {*rare} == {f.name for f in fields(agl.GRPO)} | {*groups.GROUPS}
    assert "clip_low" not in pydoc.render_doc(agl.GRPO).split("Method resolution order")[0]


@pytest.mark.parametrize(
    "algorithm", [agl.GRPO, agl.DrGRPO, agl.RLOO, agl.REINFORCE, agl.REINFORCEPlusPlus, agl.PPO, agl.GSPO, agl.DAPO]
)
def test_a_group_sets_only_what_was_written_in_it(algorithm: type[PolicyGradient]) -> None:
    flat = algorithm(model="m", steps=5, entropy_coef=0.5, betas=(0.8, 0.9), dtype="float32", val_before_train=False)
    grouped = algorithm(
        model="m",
        steps=5,
        loss=agl.Loss(entropy_coef=0.5),
        optimizer=agl.Optimizer(betas=(0.8, 0.9)),
        device=agl.Device(dtype="float32"),
        sampling=agl.Sampling(val_before_train=False),
    )
    assert grouped == flat
    empty = algorithm(model="m", steps=5, loss=agl.Loss(), optimizer=None, sampling=agl.Sampling(), device=agl.Device())
    assert empty == algorithm(model="m", steps=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"clip_low": 0.1, "loss": agl.Loss(clip_low=0.2)},
            "clip_low is set twice: clip_low=0.1 and loss=agl.Loss(clip_low=0.2)",
        ),
        ({"loss": agl.Optimizer(warmup_steps=2)}, "loss=agl.Optimizer(warmup_steps=2)\n  -> use agl.Loss(...)"),
        ({"device": agl.Loss()}, "device=agl.Loss()\n  -> use agl.Device(...)"),
        ({"optimizer": "adamw"}, "optimizer='adamw'\n  -> use agl.Optimizer(...)"),
        ({"clip": 0.1}, "GRPO has no option 'clip'"),
    ],
)
def test_a_wrong_group_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        agl.GRPO(model="m", steps=1, **options)


def test_a_group_refuses_what_it_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"Loss has no option 'clip_lo'\n  -> did you mean 'clip_low'"):
        agl.Loss(clip_lo=0.1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"SFT has no option 'loss'"):
        agl.SFT(model="m", epochs=1, data=None, loss=agl.Loss())  # type: ignore[call-arg]
