"""The objectives give the numbers of verl 0.9.1 (verl.trainer.ppo.core_algos), loss and gradient alike."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from agl.sequence import Sequence
from agl.trainer.local.packing import chain
from agl.trainer.objectives.advantages import grpo_advantages
from agl.trainer.objectives.kl import kl_penalty
from agl.trainer.objectives.losses import entropy, policy_loss
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


def as_rows(mask: torch.Tensor) -> list[Sequence]:
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
