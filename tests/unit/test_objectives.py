"""Objectives: advantages count rollouts, losses are per token, weights do not depend on how rows are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from grpo import grpo_advantages
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError, RewardError
from agl.mdp.sequence import merge, unmerged
from agl.mdp.types import Call, Trajectory, Transition, float_array, int_array
from agl.trainer.objectives.kl import kl_penalty
from agl.trainer.objectives.losses import entropy, policy_loss
from agl.trainer.objectives.reduction import token_weights, weighted


def conversation(turns: int, answer: int = 3) -> Trajectory:
    """A conversation that only grows: `turns` calls, the k-th with `answer + k` sampled tokens."""
    history: list[int] = [1, 2]
    transitions = []
    for k in range(turns):
        response = [10 + k] * (answer + k)
        call = Call(
            id=f"c{k}",
            rollout_id="r",
            attempt=1,
            index=k,
            agent="a",
            policy="policy",
            policy_version=0,
            prompt_ids=int_array(history),
            response_ids=int_array(response),
            logprobs=float_array([-1.0] * len(response)),
        )
        transitions.append(Transition(call))
        history = [*history, *response, 3]
    return Trajectory("r", 1, "policy", "g", tuple(transitions))


class TestAdvantages:
    def test_a_group_is_centred_and_scaled_by_its_sample_deviation(self):
        advantages = grpo_advantages([1.0, 0.0, 0.0, 0.0, 5.0, 5.0], ["a"] * 4 + ["b"] * 2)
        assert advantages.dtype == np.float32
        np.testing.assert_allclose(advantages[:4], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
        assert advantages[4:].tolist() == [0.0, 0.0]

    def test_groups_do_not_touch_each_other(self):
        together = grpo_advantages([1, 0, 10, 30], [0, 0, 1, 1])
        assert together[:2].tolist() == grpo_advantages([1, 0], [0, 0]).tolist()

    def test_without_normalisation_the_advantage_keeps_the_reward_unit(self):
        assert grpo_advantages([4.0, 0.0], ["g", "g"], normalize_std=False).tolist() == [2.0, -2.0]

    def test_a_group_of_one_keeps_its_return(self):
        np.testing.assert_allclose(grpo_advantages([0.5], ["g"]), [0.5], rtol=1e-5)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_return_that_is_not_finite_names_its_group(self, bad: float):
        with pytest.raises(RewardError, match=r"rollout 1 of 2 .*group=task-7"):
            grpo_advantages([0.0, bad], ["task-7", "task-7"])

    def test_one_group_per_return(self):
        with pytest.raises(ValueError, match="2 groups"):
            grpo_advantages([1.0], ["a", "b"])

    @given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.floats(-50, 50), st.floats(0.5, 10))
    def test_shifting_and_scaling_rewards_changes_nothing(self, returns: list[float], shift: float, scale: float):
        base = grpo_advantages(returns, [0] * len(returns), epsilon=0.0) if np.std(returns) > 1e-3 else None
        if base is not None:
            moved = grpo_advantages([scale * r + shift for r in returns], [0] * len(returns), epsilon=0.0)
            np.testing.assert_allclose(moved, base, atol=1e-4)


class TestPolicyLoss:
    def test_on_policy_the_gradient_is_minus_the_advantage(self):
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        result = policy_loss(logprobs, logprobs.detach(), torch.tensor([0.5, -2.0]))
        result.loss.sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [-0.5, 2.0]
        assert not result.clipped.any()
        assert not result.dual_clipped.any()

    def test_a_ratio_past_the_clip_gets_no_gradient_where_the_advantage_pushed_it(self):
        old = torch.zeros(4)
        logprobs = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
        advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
        result = policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.3)
        result.loss.sum().backward()
        assert logprobs.grad is not None
        assert (logprobs.grad != 0).tolist() == [False, True, True, False]
        assert result.clipped.tolist() == [True, False, False, True]
        np.testing.assert_allclose(result.loss.detach().numpy(), [-1.3, -np.exp(-0.5), np.exp(0.5), 0.8], rtol=1e-6)

    def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely(self):
        logprobs = torch.tensor([3.0], requires_grad=True)
        bounded = policy_loss(logprobs, torch.zeros(1), torch.tensor([-1.0]), clip_c=3.0)
        assert bounded.loss.item() == pytest.approx(3.0)
        assert bounded.dual_clipped.all()
        assert policy_loss(logprobs, torch.zeros(1), torch.tensor([-1.0]), clip_c=None).loss.item() > 20

    def test_a_huge_log_ratio_stays_finite(self):
        assert torch.isfinite(policy_loss(torch.zeros(1), torch.full((1,), -1e4), torch.ones(1)).loss).all()


class TestKLAndEntropy:
    def test_equal_policies_have_no_divergence(self):
        logprobs = torch.tensor([-0.3, -4.0])
        for kind in ("k1", "k2", "k3"):
            assert kl_penalty(logprobs, logprobs, kind).tolist() == [0.0, 0.0]

    def test_k1_and_k3_are_unbiased(self):
        torch.manual_seed(0)
        p, q = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
        exact = (p.exp() * (p - q)).sum().item()
        for kind in ("k1", "k3"):
            assert (p.exp() * kl_penalty(p, q, kind)).sum().item() == pytest.approx(exact, abs=1e-9)

    def test_k3_is_never_negative(self):
        assert (kl_penalty(torch.randn(100), torch.randn(100), "k3") >= 0).all()

    def test_entropy_of_equal_logits_is_the_log_of_their_number(self):
        assert entropy(torch.zeros(2, 8)).tolist() == pytest.approx([np.log(8)] * 2)


class TestTokenWeights:
    LENGTHS = (3, 4, 5)

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("token-mean", [1 / 12] * 3),
            ("seq-mean-token-sum", [1 / 3] * 3),
            ("seq-mean-token-mean", [1 / 9, 1 / 12, 1 / 15]),
        ],
    )
    def test_each_call_is_a_sequence(self, mode, expected):
        (row,) = merge(conversation(3), {"c0": 1, "c1": 1, "c2": 1})
        (weights,) = token_weights([row], mode)
        for k, weight in enumerate(expected):
            np.testing.assert_allclose(weights[row.calls == k], weight, rtol=1e-6)
        assert not weights[~row.action_mask].any()

    def test_a_constant_scale_replaces_the_length(self):
        (row,) = merge(conversation(2), {"c0": 1, "c1": 1})
        (weights,) = token_weights([row], "seq-mean-token-sum-norm", loss_scale_factor=100)
        np.testing.assert_allclose(weights[row.action_mask], 1 / 200, rtol=1e-6)

    @pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
    @given(turns=st.integers(1, 6))
    def test_merging_changes_no_weight(self, mode, turns: int):
        advantages = {f"c{k}": 1.0 for k in range(turns)}
        merged = weighted(merge(conversation(turns), advantages), mode)
        apart = weighted(unmerged(conversation(turns), advantages), mode)
        both = [np.concatenate([row.weights[row.action_mask] for row in rows]) for rows in (merged, apart)]
        np.testing.assert_array_equal(both[0], both[1])
        assert len(merged) == 1

    def test_a_masked_call_is_not_a_sequence(self):
        whole, cut = merge(conversation(1), {"c0": 1}), conversation(1, answer=2)
        call = cut.transitions[0].call
        object.__setattr__(call, "finish_reason", "cancelled")
        masked = merge(cut, {"c0": 1})
        assert token_weights([*whole, *masked], "seq-mean-token-sum")[0].max() == 1.0
        assert not token_weights(masked, "seq-mean-token-mean")[0].any()

    def test_the_scale_factor_belongs_to_one_mode(self):
        with pytest.raises(ConfigError, match="loss_scale_factor"):
            token_weights([], "token-mean", loss_scale_factor=3)
        with pytest.raises(ConfigError, match="loss_scale_factor"):
            token_weights([], "seq-mean-token-sum-norm")
