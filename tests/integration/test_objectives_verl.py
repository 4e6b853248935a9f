"""The objectives give the numbers of verl 0.9.1 (verl.trainer.ppo.core_algos), loss and gradient alike."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from grpo import grpo_advantages

from agl.credit import Uniform
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import Call, Reward, Trajectory, Transition, float_array, int_array
from agl.trainer.algorithms.groups import Overlong
from agl.trainer.local.learner.prefix_trees import chain
from agl.trainer.objectives import Estimator
from agl.trainer.objectives.advantages import compute_advantages, whiten
from agl.trainer.objectives.gae import gae, value_loss
from agl.trainer.objectives.importance import importance_weights
from agl.trainer.objectives.kl import kl_penalty
from agl.trainer.objectives.losses import entropy, loss_of, policy_loss
from agl.trainer.objectives.reduction import token_weights

if sys.version_info >= (3, 13):
    pytest.skip("verl 0.9.1 does not install on Python 3.13 and newer", allow_module_level=True)

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl 0.9.1: pip install 'agl[dev]'")

ROWS, WIDTH = 6, 9


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Answers of different lengths, one of them empty, with ratios far on both sides of every clip."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(ROWS, WIDTH, generator=generator)
    lengths = torch.tensor([9, 4, 1, 7, 0, 5])
    return {
        "old": old,
        "new": old + torch.randn(ROWS, WIDTH, generator=generator),
        "advantages": torch.randn(ROWS, WIDTH, generator=generator),
        "mask": (torch.arange(WIDTH) < lengths[:, None]).float(),
    }


def as_rows(mask: torch.Tensor) -> list[TrainingRow]:
    """The batch's answers as rows of one call each, after one prompt token."""
    from dataclasses import replace

    rows = []
    for i, line in enumerate(mask.bool().numpy()):
        action = np.concatenate([[False], line])
        row = chain(np.zeros(action.size, dtype=np.int32))
        rows.append(replace(row, call_ids=(f"c{i}",), action_mask=action, calls=np.where(action, 0, -1)))
    return rows


def weights_like(mask: torch.Tensor, mode, **kwargs) -> torch.Tensor:
    return torch.from_numpy(np.stack([w[1:] for w in token_weights(as_rows(mask), mode, **kwargs)]))


@pytest.mark.parametrize("normalize", [True, False])
def test_grpo_advantages(normalize: bool):
    rng = np.random.default_rng(0)
    groups = np.array(["a", "b", "a", "c", "b", "a", "d", "d"], dtype=object)
    returns = rng.normal(size=groups.size)
    returns[6:] = 0.25
    rewards = torch.zeros(groups.size, 4, dtype=torch.float64)
    rewards[:, -1] = torch.from_numpy(returns)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=torch.ones_like(rewards),
        index=groups,
        norm_adv_by_std_in_grpo=normalize,
    )
    ours = grpo_advantages(returns, groups.tolist(), normalize_std=normalize)
    np.testing.assert_allclose(ours, theirs[:, 0].numpy(), atol=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("clips", [(0.2, 0.2, 3.0), (0.1, 0.4, 1.5)])
def test_policy_loss_and_reduction(batch: dict[str, torch.Tensor], mode, clips: tuple[float, float, float]):
    from verl.workers.config import FSDPActorConfig

    low, high, c = clips
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=c,
    )
    theirs_in = batch["new"].clone().requires_grad_()
    theirs, metrics = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=batch["old"],
        log_prob=theirs_in,
        advantages=batch["advantages"],
        response_mask=batch["mask"],
        loss_agg_mode=mode,
        config=config,
    )
    theirs.backward()

    ours_in = batch["new"].clone().requires_grad_()
    result = policy_loss(ours_in, batch["old"], batch["advantages"], clip_low=low, clip_high=high, clip_c=c)
    factor = {"loss_scale_factor": WIDTH} if mode == "seq-mean-token-sum-norm" else {}
    ours = (weights_like(batch["mask"], mode, **factor) * result.loss).sum()
    ours.backward()

    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, atol=1e-6, rtol=1e-5)
    trained = batch["mask"].bool()
    assert result.clipped[trained].float().mean().item() == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)
    assert -result.log_ratio[trained].mean().item() == pytest.approx(metrics["actor/ppo_kl"], abs=1e-6)
    assert result.dual_clipped[trained].float().mean().item() == pytest.approx(
        metrics["actor/pg_clipfrac_lower"], abs=1e-6
    )


@pytest.mark.parametrize(("kind", "name"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3", "low_var_kl")])
def test_kl_penalty(batch: dict[str, torch.Tensor], kind, name: str):
    gradients = []
    for function, argument in ((kl_penalty, kind), (core_algos.kl_penalty, name)):
        logprob = batch["new"].clone().requires_grad_()
        value = function(logprob, batch["old"], argument)
        value.sum().backward()
        gradients.append((value.detach(), logprob.grad))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-6)


def test_entropy(batch: dict[str, torch.Tensor]):
    logits = torch.randn(ROWS, WIDTH, 11, generator=torch.Generator().manual_seed(1))
    theirs = core_algos.compute_entropy_loss(logits, batch["mask"], "token-mean")
    ours = (weights_like(batch["mask"], "token-mean") * entropy(logits)).sum()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)


# -- estimators: through the trajectories, groups and tokens that training itself uses ---------------------------------

GROUPS = np.array(["a", "b", "a", "b", "a", "c", "c", "b"], dtype=object)
LENGTHS = [3, 1, 5, 2, 4, 5, 1, 2]


def step() -> tuple[list[Trajectory], torch.Tensor, torch.Tensor]:
    """Rollouts of one call each, their rewards at the last token [N, W], and their masks [N, W]."""
    returns = np.random.default_rng(3).normal(size=GROUPS.size)
    rewards, mask = torch.zeros(GROUPS.size, 5, dtype=torch.float64), torch.zeros(GROUPS.size, 5, dtype=torch.float64)
    made = []
    for i, (group, n, value) in enumerate(zip(GROUPS, LENGTHS, returns, strict=True)):
        rewards[i, n - 1], mask[i, :n] = value, 1
        call = Call(
            f"c{i}", f"r{i}", 1, 0, "a", "policy", 0, int_array([1]), int_array([2] * n), float_array([-1.0] * n)
        )
        made.append(Trajectory(f"r{i}", 1, None, group, (Transition(call),), (Reward("reward", float(value)),)))
    return made, rewards, mask


@pytest.mark.parametrize(
    ("estimator", "name"),
    [
        ("rloo", "rloo"),
        ("reinforce_plus_plus", "reinforce_plus_plus"),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
        ("grpo", "grpo"),
    ],
)
def test_estimators(estimator: Estimator, name: str):
    from verl.trainer.config import AlgoConfig

    trajectories, rewards, mask = step()
    options = {} if name == "reinforce_plus_plus" else {"index": GROUPS}
    theirs, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, config=AlgoConfig(gamma=1.0), **options
    )
    ours = compute_advantages(trajectories, Uniform(), estimator=estimator)
    for i in range(GROUPS.size):
        assert ours.advantages[f"c{i}"] == pytest.approx(theirs[i, 0].item(), abs=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_generalised_advantages(gamma: float, lam: float):
    _, rewards, mask = step()
    values = torch.randn(rewards.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs, targets = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    found = [
        gae(values[i, :n].float().numpy(), float(rewards[i].sum()), gamma=gamma, lam=lam) for i, n in enumerate(LENGTHS)
    ]
    raw = np.concatenate([a for a, _ in found])
    np.testing.assert_allclose(whiten(raw, np.ones(raw.size, dtype=np.int64)), theirs[mask.bool()], atol=1e-6)
    np.testing.assert_allclose(np.concatenate([t for _, t in found]), targets[mask.bool()], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("gspo", "token-mean"),
        ("gspo", "seq-mean-token-mean"),
        ("cispo", "token-mean"),
        ("cispo", "seq-mean-token-mean"),
        ("sapo", "seq-mean-token-mean"),
    ],
)
def test_other_policy_losses(batch: dict[str, torch.Tensor], kind, mode):
    compare_policy_losses(batch, kind, mode)


def test_geometric_mean(batch: dict[str, torch.Tensor]):
    """It knows one advantage per answer; and verl counts an answer without tokens, which we have no row for."""
    batch["advantages"] = batch["advantages"][:, :1].expand(ROWS, WIDTH)
    with_tokens = batch["mask"].any(-1)
    compare_policy_losses({k: v[with_tokens] for k, v in batch.items()}, "geo_mean", "seq-mean-token-mean")


def compare_policy_losses(batch: dict[str, torch.Tensor], kind, mode) -> None:
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.1, clip_ratio_high=0.2
    )
    theirs_in = batch["new"].clone().requires_grad_()
    theirs, _ = core_algos.get_policy_loss_fn(kind)(
        old_log_prob=batch["old"], log_prob=theirs_in, advantages=batch["advantages"], response_mask=batch["mask"],
        loss_agg_mode=mode, config=config,
    )  # fmt: skip
    theirs.backward()

    ours_in = batch["new"].clone().requires_grad_()
    trained = batch["mask"].bool()
    calls = torch.arange(len(trained))[:, None].expand(trained.shape)[trained]
    result = loss_of(
        kind, ours_in[trained], batch["old"][trained], batch["advantages"][trained], calls,
        clip_low=0.1, clip_high=0.2, clip_c=3.0,
    )  # fmt: skip
    ours = (weights_like(batch["mask"], mode)[trained] * result.loss).sum()
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.0, 2.0, 100.0, (0.05, 20.0)])
def test_importance_weights(batch: dict[str, torch.Tensor], level, threshold):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    ratio, trained = batch["new"] - batch["old"], batch["mask"].bool()
    spec = "_".join(map(str, threshold)) if isinstance(threshold, tuple) else threshold
    theirs, _ = compute_rollout_correction_weights(ratio, batch["mask"], level, spec)
    calls = np.repeat(np.arange(ROWS), WIDTH)[trained.flatten().numpy()]
    ours = importance_weights(ratio[trained].numpy(), calls, level, threshold)
    np.testing.assert_allclose(ours, theirs[trained].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threshold", [(0.5, 2.0), (0.625, 1.6)])
def test_answers_whose_mean_ratio_is_out_of_bounds_are_not_trained(batch: dict[str, torch.Tensor], threshold):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    ratio, trained = batch["new"] - batch["old"], batch["mask"].bool()
    kept, _ = compute_rollout_rejection_mask(ratio, batch["mask"], "seq_mean_k1", "_".join(map(str, threshold)))
    calls = np.repeat(np.arange(ROWS), WIDTH)[trained.flatten().numpy()]
    ours = importance_weights(ratio[trained].numpy(), calls, "geometric", threshold)
    assert (ours > 0).tolist() == kept[trained].bool().tolist()
    assert 0 < (ours > 0).sum() < ours.size, "some are kept, and some are not"
    means = {c: np.exp(ratio[trained].numpy()[calls == c].mean()) for c in set(calls)}
    np.testing.assert_allclose(ours[ours > 0], [means[c] for c in calls[ours > 0]], rtol=1e-5)


def test_value_loss(batch: dict[str, torch.Tensor]):
    gradients, losses = [], []
    targets = batch["advantages"]
    theirs_in, ours_in = (batch["new"].clone().requires_grad_() for _ in range(2))
    loss, _ = core_algos.compute_value_loss(theirs_in, targets, batch["old"], batch["mask"], 0.5, "token-mean")
    loss.backward()
    ours = (weights_like(batch["mask"], "token-mean") * value_loss(ours_in, batch["old"], targets, 0.5)).sum()
    ours.backward()
    for value, given in ((loss, theirs_in), (ours, ours_in)):
        losses.append(value.item())
        gradients.append(given.grad)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)


def test_the_penalty_for_long_answers():
    """verl computes it in its DAPO reward manager, beside the reward."""
    shape = Overlong(buffer=4, penalty=0.5).of(10)

    def theirs(length: int) -> float:
        return min(-(length - (10 - 4)) / 4 * 0.5, 0)

    for n in range(1, 11):
        call = Call("c", "r", 1, 0, "a", "p", 0, int_array([1]), int_array([2] * n), float_array([-1.0] * n))
        assert shape(Transition(call)) == pytest.approx(theirs(n))
