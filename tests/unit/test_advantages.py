"""From rewards to advantages: a rollout counts once, groups are worlds of their own, only whole groups are dropped."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.credit import Uniform
from agl.errors import RewardError
from agl.mdp.types import Call, Reward, Trajectory, Transition, float_array, int_array
from agl.trainer.objectives.advantages import StepAdvantages, compute_advantages, grpo_advantages

numbers = st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3))
rollouts = st.tuples(st.sampled_from("abc"), st.sampled_from(["p", "q"]), numbers, st.integers(1, 4))
"""(group, policy, reward, number of calls)"""
steps = st.lists(rollouts, min_size=1, max_size=12)
Step = list[tuple[str, str, float, int]]


def trajectory(
    index: int, group: str, policy: str, reward: float, n_calls: int, *, each: tuple[float, ...] = (), cut: bool = False
) -> Trajectory:
    """A rollout with a final reward, and the calls' own rewards in `each`."""

    def transition(k: int) -> Transition:
        call = Call(
            f"r{index}.{k}", f"r{index}", 1, k, "a", policy, 0, int_array([1]), int_array([2]), float_array([-1.0]),
            finish_reason="cancelled" if cut else "stop",
        )  # fmt: skip
        return Transition(call, (Reward("own", each[k]),) if each else ())

    transitions = tuple(transition(k) for k in range(n_calls))
    return Trajectory(f"r{index}", 1, policy, group, transitions, (Reward("reward", reward),))


def scored(step: Step, **options: bool) -> StepAdvantages:
    return compute_advantages([trajectory(i, *r) for i, r in enumerate(step)], Uniform(), **options)


@given(steps, st.booleans())
def test_one_call_per_rollout_is_the_published_formula(step: Step, normalize: bool) -> None:
    got = scored([(g, p, x, 1) for g, p, x, _ in step], normalize_std=normalize)
    want = grpo_advantages([x for _, _, x, _ in step], [(g, p) for g, p, _, _ in step], normalize_std=normalize)
    size = Counter((g, p) for g, p, _, _ in step)
    for i, (group, policy, _, _) in enumerate(step):
        assert got.advantages[f"r{i}.0"] == (want[i] if size[group, policy] > 1 else 0.0)


@given(steps)
def test_a_rollout_counts_once_however_many_calls_it_made(step: Step) -> None:
    many, one = scored(step), scored([(g, p, x, 1) for g, p, x, _ in step])
    for i, (*_, n_calls) in enumerate(step):
        assert {many.advantages[f"r{i}.{k}"] for k in range(n_calls)} == {one.advantages[f"r{i}.0"]}


@given(steps, rollouts)
def test_a_group_is_a_world_of_its_own(step: Step, more: tuple) -> None:
    before, after = scored(step), scored([*step, more])
    for i, (group, policy, _, n_calls) in enumerate(step):
        if (group, policy) != more[:2]:
            ids = [f"r{i}.{k}" for k in range(n_calls)]
            assert [after.advantages[c] for c in ids] == [before.advantages[c] for c in ids]


@given(steps)
def test_what_is_dropped_is_a_whole_group_and_is_reported(step: Step) -> None:
    got = scored(step)
    size = Counter((g, p) for g, p, _, _ in step)
    assert Counter((t.group, t.policy) for t in got.trajectories) == {g: n for g, n in size.items() if n > 1}
    assert got.dropped_groups == sum(n == 1 for n in size.values())
    dropped = {c.rollout_id for c in got.calls if c.dropped}
    assert dropped == {f"r{i}" for i, (g, p, _, _) in enumerate(step) if size[g, p] == 1}
    assert len(got.calls) == len(got.advantages) == sum(n for *_, n in step)


@given(steps)
def test_advantages_of_a_group_sum_to_nothing_over_its_rollouts(step: Step) -> None:
    got = scored(step)
    sums: Counter[tuple[str, str]] = Counter()
    for i, (group, policy, _, _) in enumerate(step):
        sums[group, policy] += got.advantages[f"r{i}.0"]  # type: ignore[assignment]
    assert all(abs(s) < 1e-4 for s in sums.values())


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -1.1])
def test_equal_rewards_give_exactly_nothing_to_learn(reward: float) -> None:
    got = scored([("a", "p", reward, 2)] * 3 + [("b", "p", 0.0, 1), ("b", "p", 1.0, 1)])
    assert {got.advantages[f"r{i}.{k}"] for i in range(3) for k in range(2)} == {0.0}
    assert (got.zero_variance_groups, got.dropped_groups) == (1, 0)
    assert got.advantages["r4.0"] == pytest.approx(2**-0.5, rel=1e-5)


def test_a_credit_rule_may_tell_calls_apart_and_the_rollout_still_counts_once() -> None:
    def per_call(t: Trajectory) -> list[float]:
        return [x.reward for x in t.transitions]

    got = compute_advantages(
        [trajectory(0, "a", "p", 0.0, 2, each=(1.0, 3.0)), trajectory(1, "a", "p", 0.0, 1, each=(4.0,))], per_call
    )
    mean, std = 3.0, np.std([2.0, 4.0], ddof=1)
    assert got.advantages == pytest.approx({k: (v - mean) / std for k, v in {"r0.0": 1, "r0.1": 3, "r1.0": 4}.items()})
    assert [c.reward for c in got.calls] == [c.return_ for c in got.calls] == [1.0, 3.0, 4.0]


def test_calls_that_differ_in_rollouts_that_do_not_are_compared_without_a_division_by_nothing() -> None:
    step = [trajectory(i, "a", "p", 0.0, 2, each=(1.0, 3.0)) for i in range(2)]
    got = compute_advantages(step, lambda t: [x.reward for x in t.transitions])
    assert got.advantages == {"r0.0": -1.0, "r0.1": 1.0, "r1.0": -1.0, "r1.1": 1.0}


def test_an_answer_cut_short_counts_in_its_group_and_says_why_it_is_not_trained() -> None:
    got = compute_advantages([trajectory(0, "a", "p", 0.0, 1, cut=True), trajectory(1, "a", "p", 1.0, 1)], Uniform())
    assert got.advantages["r1.0"] > 0
    assert [c.dropped for c in got.calls] == ["its answer was cancelled", None]


def test_a_bad_credit_rule_is_named() -> None:
    with pytest.raises(RewardError, match="gave 0 returns for 2 calls"):
        compute_advantages([trajectory(0, "a", "p", 1.0, 2)], lambda t: [])
    with pytest.raises(RewardError, match="gave the return nan"):
        compute_advantages([trajectory(0, "a", "p", 1.0, 1)], lambda t: [float("nan")])
    with pytest.raises(RewardError, match="rollout 1 of 2 is inf"):
        grpo_advantages([0.0, float("inf")], ["a", "a"])
    with pytest.raises(ValueError, match="but 1 groups"):
        grpo_advantages([0.0, 1.0], ["a"])


def test_nothing_gives_nothing() -> None:
    got = compute_advantages([], Uniform())
    assert (got.trajectories, got.calls, got.dropped_groups) == ((), (), 0)
