"""From rewards to advantages: a rollout counts once, groups are worlds of their own, only whole groups are dropped."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import numpy as np
import pytest
from grpo import grpo_advantages
from hypothesis import given
from hypothesis import strategies as st

from agl.credit import PerAgent, TurnGroups, Uniform
from agl.errors import ConfigError, RewardError
from agl.mdp.types import Call, Reward, Trajectory, Transition, float_array, int_array
from agl.trainer.algorithms import REINFORCE
from agl.trainer.objectives.advantages import StepAdvantages, compute_advantages

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
    compared = {g for (g, _), n in size.items() if n > 1}
    assert got.dropped_groups == {g for g, _ in size} - compared
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
    assert (got.zero_variance_groups, got.dropped_groups) == ({"a"}, set())
    assert got.advantages["r4.0"] == pytest.approx(2**-0.5, rel=1e-5)


@given(steps)
def test_a_group_has_equal_returns_if_all_that_is_compared_in_it_has(step: Step) -> None:
    """Policies are compared apart, and so are agents: a group is still one."""
    got = scored(step)
    of_comparison: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group, policy, reward, _ in step:
        of_comparison[group, policy].append(reward)
    compared = {of: rewards for of, rewards in of_comparison.items() if len(rewards) > 1}
    unequal = {group for (group, _), rewards in compared.items() if len(set(rewards)) > 1}
    assert got.zero_variance_groups == {group for group, _ in compared} - unequal


def test_equal_rollouts_whose_calls_differ_have_something_to_learn() -> None:
    def per_call(t: Trajectory) -> list[float]:
        return [x.reward for x in t.transitions]

    both = [trajectory(i, "a", "p", 0.0, 2, each=(1.0, 3.0)) for i in range(2)]
    assert compute_advantages(both, per_call).zero_variance_groups == frozenset()
    assert compute_advantages(both, Uniform()).zero_variance_groups == {"a"}


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
    assert (got.trajectories, got.calls, got.dropped_groups) == ((), (), frozenset())


# -- a running baseline per role --------------------------------------------------------------------------------------

games = st.lists(st.tuples(numbers, numbers, st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=8)
"""Of one step: what the first and the second player earned, and how many calls each made."""
Games = list[tuple[float, float, int, int]]


def game(index: int, first: float, second: float, *n_calls: int) -> Trajectory:
    """A rollout in which two agents of one policy play, each paid apart."""
    calls = [
        Call(f"r{index}.{agent}{k}", f"r{index}", 1, k, agent, "p", 0, int_array([1]), int_array([2]),
             float_array([-1.0]))
        for agent, n in zip(("first", "second"), n_calls, strict=True)
        for k in range(n)
    ]  # fmt: skip
    rewards = (Reward("reward", first, agent="first"), Reward("reward", second, agent="second"))
    return Trajectory(f"r{index}", 1, "p", f"task {index}", tuple(map(Transition, calls)), rewards)


def played(*steps_: Games, decay: float = 0.9) -> list[StepAdvantages]:
    """Each step with the baselines that the one before left, as JSON, which a resumed run reads them from."""
    found: list[StepAdvantages] = []
    for step in steps_:
        before = json.loads(json.dumps(dict(found[-1].baselines))) if found else None
        found.append(
            compute_advantages(
                [game(i, *g) for i, g in enumerate(step)],
                PerAgent(),
                estimator="running_baseline",
                baselines=before,
                baseline_decay=decay,
            )
        )
    return found


@given(games, games, st.floats(0, 0.99))
def test_a_role_is_compared_with_its_own_running_mean(one: Games, two: Games, decay: float) -> None:
    first, second = played(one, two, decay=decay)
    for place, role in enumerate(("first", "second")):
        # (return, number of calls) of the role in each game
        earned = [[((g[0], g[2]), (g[1], g[3]))[place] for g in step] for step in (one, two)]
        means = [[value for value, n in step if n] for step in earned]
        base = float(np.mean(means[0] or means[1] or [0.0]))
        for step, got in zip(earned, (first, second), strict=True):
            for i, (value, n) in enumerate(step):
                for k in range(n):
                    assert got.advantages[f"r{i}.{role}{k}"] == pytest.approx(value - base, abs=1e-4)
        if means[0] and means[1]:
            assert second.baselines[role] == pytest.approx(decay * base + (1 - decay) * float(np.mean(means[1])))
    assert first.dropped_groups == second.dropped_groups == frozenset()
    assert len(first.trajectories) == len(one), "a task with one rollout is trained"


@given(games, games, numbers, st.data())
def test_a_baseline_does_not_depend_on_what_it_is_subtracted_from(
    one: Games, two: Games, other: float, data: st.DataObject
) -> None:
    """So that it does not bias the gradient: another result of one game changes the advantages of that game alone."""
    changed = data.draw(st.integers(0, len(two) - 1))
    two_changed = [(other, -other, g[2], g[3]) if i == changed else g for i, g in enumerate(two)]
    before, after = played(one, two)[1], played(one, two_changed)[1]
    known = played(one)[0].baselines
    for call, value in before.advantages.items():
        role = call.partition(".")[2].rstrip("0123456789")
        if role in known and not call.startswith(f"r{changed}."):
            assert after.advantages[call] == value


@given(st.lists(games, min_size=2, max_size=4), numbers)
def test_what_a_role_always_earns_is_worth_nothing(steps_: list[Games], bonus: float) -> None:
    """A game that favours a role teaches as much as one that does not, from the first step on."""
    favoured = [[(first + bonus, second, n, m) for first, second, n, m in step] for step in steps_]
    for plain, with_bonus in zip(played(*steps_), played(*favoured), strict=True):
        for call, value in plain.advantages.items():
            assert with_bonus.advantages[call] == pytest.approx(value, abs=1e-3)


@given(games)
def test_a_game_counts_once_in_its_roles_mean_however_many_calls_it_had(step: Games) -> None:
    once = [(a, b, 1, min(1, n)) for a, b, _, n in step]
    assert played(step)[0].baselines == pytest.approx(played(once)[0].baselines)


def test_a_rule_with_comparisons_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="use it with GRPO or RLOO"):
        compute_advantages([game(0, 1, -1, 1, 1)], TurnGroups(), estimator="running_baseline")


def test_a_decay_is_below_one() -> None:
    with pytest.raises(ConfigError, match="baseline_decay=1"):
        REINFORCE(model="m", steps=1, baseline_decay=1.0)
