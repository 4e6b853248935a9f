"""verl's config dict: its numbers reach GRPO, and nothing in it is ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest
from verl_config import CONFIG, changed, plan

import agl
from agl.errors import ConfigError
from agl_verl.config.local import as_grpo, check


def test_the_numbers_reach_grpo() -> None:
    grpo = as_grpo(agl.VERL(CONFIG, backend="local").plan, n_tasks=21)
    assert (grpo.model, grpo.batch_size, grpo.group_size, grpo.minibatches) == ("some/model", 8, 4, 2)
    assert grpo.steps == 21 // 8 * 3  # verl drops an epoch's incomplete batch
    assert (grpo.learning_rate, grpo.weight_decay, grpo.grad_clip) == (3e-6, 0.01, 1.0)
    assert (grpo.clip_low, grpo.clip_high, grpo.kl_coef, grpo.kl_kind) == (0.1, 0.3, 0.02, "k3")
    assert (grpo.temperature, grpo.val_temperature, grpo.val_every, grpo.val_before_train) == (0.9, 0.0, 4, False)
    assert (grpo.max_context, grpo.max_response_tokens, grpo.normalize_std) == (500, 100, False)
    assert check(plan(CONFIG)) == ("trainer.critic_warmup", "trainer.logger")


def test_a_step_of_verls_warm_up_is_all_of_a_steps_updates() -> None:
    """Its scheduler moves once a step, ours at every update."""
    assert as_grpo(plan(changed("actor_rollout_ref.actor.optim.lr_warmup_steps", 3)), n_tasks=21).warmup_steps == 3 * 2
    ratio = plan(changed("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", 0.5))
    assert as_grpo(ratio, n_tasks=21).warmup_steps == 3 * 2


def test_other_estimators_and_gspo_reach_grpo_too() -> None:
    rloo = as_grpo(plan(changed("algorithm.adv_estimator", "rloo")), n_tasks=21)
    gspo = as_grpo(plan(changed("actor_rollout_ref.actor.policy_loss", {"loss_mode": "gspo"})), n_tasks=21)
    assert (rloo.adv_estimator, gspo.policy_loss) == ("rloo", "gspo")


def test_without_a_kl_loss_its_coefficient_does_not_count() -> None:
    assert plan(changed("actor_rollout_ref.actor.use_kl_loss", False)).kl_coef == 0.0


def test_steps_come_before_epochs_and_a_small_dataset_makes_one() -> None:
    assert plan(changed("trainer.total_training_steps", 5)).total_steps(1000) == 5
    assert plan(CONFIG).total_steps(3) == 1


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data.train_batchsize", 3, "data.train_batch_size"),
        ("actor_rollout_ref.train_batch_size", 3, "data.train_batch_size"),
        ("actor_rollout_ref.actor.optim.learning_rate", 1.0, "did you mean"),
        ("trainer.nnodes", 2, "uses several"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 2, "uses several"),
        ("algorithm.adv_estimator", "gae", "grpo"),
        ("actor_rollout_ref.rollout.top_p", 0.9, "policy itself"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 3, "mini-batches"),
        ("actor_rollout_ref.actor.kl_loss_type", "low_kl", "low_var_kl"),
        ("actor_rollout_ref.rollout.n", 1, "at least 2"),
        ("actor_rollout_ref.actor.optim.lr", "fast", "lr='fast'"),
        ("data.train_batch_size", "8", "not a whole number"),
        ("actor_rollout_ref.actor.tau_pos", 2.0, "tau_pos"),
        ("algorithm.rollout_correction.bypass_mode", True, "backend='cluster'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        agl.VERL(changed(key, value), backend="local")
    assert said in str(refused.value)


def test_null_is_left_out() -> None:
    assert plan(changed("data.train_batch_size", None)).batch_size == 1024
    with pytest.raises(ConfigError, match=r"has no actor_rollout_ref.model.path"):
        plan(changed("actor_rollout_ref.model.path", None))


@pytest.mark.parametrize("key", ["algorithm", "actor_rollout_ref"])
def test_what_must_be_given_is_asked_for(key: str) -> None:
    with pytest.raises(ConfigError, match=r"names no algorithm|has no actor_rollout_ref"):
        agl.VERL({k: v for k, v in CONFIG.items() if k != key}, backend="local")
