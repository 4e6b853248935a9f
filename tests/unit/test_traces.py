"""Which rollouts and calls are imitated, and which two rollouts are a preference pair."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from call_trees import call, random_calls, trajectory
from hypothesis import given
from hypothesis import strategies as st

import agl
from agl.errors import ConfigError, NoAgentMatchedError, NoTrainableDataError
from agl.mdp.builder import AttemptTrajectory
from agl.mdp.sequence import merge
from agl.mdp.types import Call, Reward
from agl.trainer.traces.choice import Candidate, Chosen, choose
from agl.trainer.traces.files import chains
from agl.trainer.traces.pairs import pairs

STOP = 9


def candidate(
    rollout: str,
    calls: Sequence[Call],
    reward: float | None,
    *,
    task: Any = "task",
    at: float = 0.0,
    own: dict[int, float] | None = None,
) -> Candidate:
    """A rollout with these calls and this reward; `own`: index of a call -> its own reward."""
    calls = [replace(c, id=f"{rollout}/{c.index}", rollout_id=rollout) for c in calls]
    attempt = AttemptTrajectory(trajectory(calls, rollout), (), ("agent",), (), ())
    rewards = [] if reward is None else [(Reward("reward", reward - sum((own or {}).values())), None)]
    rewards += [(Reward("tool", value), f"{rollout}/{k}") for k, value in (own or {}).items()]
    return Candidate(attempt.with_rewards(rewards), task, at)


def answer(*response: int) -> list[Call]:
    """One call with this answer."""
    return [call(0, [1, 2, 3], [*response, STOP])]


def kept(chosen: Chosen) -> list[str]:
    """The calls that are trained."""
    return [t.call.id for one in chosen.trajectories for t in one.transitions]


def check_counts(chosen: Chosen) -> None:
    """Every rollout and every call is counted once."""
    for what in ("rollouts", "calls"):
        out = sum(n for name, n in chosen.counts.items() if name.startswith(f"{what}_left_out/"))
        assert chosen.counts[what] == chosen.counts[f"{what}_kept"] + out, dict(chosen.counts)
    assert len(kept(chosen)) == chosen.counts["calls_kept"] == len(chosen.weights)


def test_rollouts_are_chosen_by_reward_and_task() -> None:
    candidates = [
        candidate("a", answer(4), 1.0, task={"x": 1, "y": 2}, at=3),
        candidate("b", answer(5), 1.0, task={"y": 2, "x": 1}, at=1),
        candidate("c", answer(6), 2.0, task={"x": 1, "y": 2}, at=4),
        candidate("d", answer(7), 0.0, task={"x": 1, "y": 2}, at=0),
        candidate("e", answer(4), 1.0, task="other", at=5),
        candidate("f", answer(8), None, task="other", at=6),
    ]
    chosen = choose(candidates, where=agl.reward() >= 1, per_task=2)
    # The best, then the oldest; the call of e is the one of a, which is out.
    assert kept(chosen) == ["b/0", "c/0", "e/0"]
    assert chosen.counts["rollouts_left_out/condition not met"] == 2
    assert chosen.counts["rollouts_left_out/more than per_task"] == 1
    check_counts(chosen)
    assert kept(choose(candidates, where="reward<1")) == ["d/0"]
    assert kept(choose(candidates, where=lambda attempt: attempt.reward is None)) == ["f/0"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=12), st.integers(1, 3))
def test_the_cap_keeps_the_best_whatever_the_order_of_arrival(rows: list[tuple[int, int, int]], most: int) -> None:
    candidates = [
        candidate(f"r{k:02d}", answer(content, 4), float(reward), task=task, at=float(k))
        for k, (content, reward, task) in enumerate(rows)
    ]
    best: set[str] = set()
    for task in range(3):
        distinct: dict[int, tuple[float, int]] = {}
        for k, (content, reward, _) in [(k, r) for k, r in enumerate(rows) if r[2] == task]:
            distinct[content] = max(distinct.get(content, (-1.0, 0)), (float(reward), -k))
        best |= {f"r{-k:02d}" for _, k in sorted(distinct.values(), reverse=True)[:most]}
    chosen = choose(candidates, per_task=most)
    check_counts(chosen)
    assert [one.rollout_id for one in chosen.trajectories] == sorted(best)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"finish_reason": "length"}, "cut at its limit"),
        ({"finish_reason": "cancelled"}, "cancelled"),
        ({"finish_reason": "error", "error": "500"}, "failed"),
        ({"agent": "judge"}, "other agent"),
        ({"response_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}, "empty"),
    ],
)
def test_a_call_that_stays_out_is_context_of_the_next_one(change: dict[str, Any], reason: str) -> None:
    first = replace(call(0, [1, 2], [3, STOP]), **change)
    second = call(1, [*first.ids.tolist(), 4], [5, STOP])
    chosen = choose([candidate("a", [first, second], 1.0)], agents="agent")
    assert kept(chosen) == ["a/1"]
    assert chosen.counts[f"calls_left_out/{reason}"] == 1
    check_counts(chosen)
    (row,) = merge(chosen.trajectories[0], chosen.weights)
    assert row.token_ids.tolist() == second.ids.tolist()
    assert row.action_mask.tolist() == [False] * second.prompt_ids.size + [True, True]


def test_a_call_with_a_bad_reward_of_its_own_stays_out_of_a_good_rollout() -> None:
    calls = [call(0, [1], [2, STOP]), call(1, [1, 2, STOP, 4], [5, STOP])]
    chosen = choose([candidate("a", calls, 1.0, own={0: -0.5})], where=agl.reward() >= 1)
    assert kept(chosen) == ["a/1"]
    assert chosen.counts["calls_left_out/own reward below 0"] == 1
    assert kept(choose([candidate("a", calls, 1.0, own={0: 0.5})])) == ["a/0", "a/1"]


def test_an_answer_that_the_client_cut_stays_out() -> None:
    first = call(0, [1, 2], [3, 4, 5, STOP])
    cut = replace(call(1, [1, 2, 3, 4, STOP, 6], [7, STOP]), fork_cause="assistant_rewritten")
    assert kept(choose([candidate("a", [first, cut], 1.0)])) == ["a/1"]
    # Another answer in its place is no cut, nor is a conversation that was taken up again.
    other = replace(call(1, [1, 2, 3, 8, STOP, 6], [7, STOP]), fork_cause="assistant_rewritten")
    again = replace(call(2, [1, 2, 3, 4, 5, STOP, 6], [7, STOP]), fork_cause="history_rewritten")
    assert kept(choose([candidate("a", [first, other, again], 1.0)])) == ["a/0", "a/1", "a/2"]


def test_what_is_done_alike_in_several_tasks_counts_in_each() -> None:
    """An expert that begins every task with the same look at the same files: its first call is half of its calls."""
    first = call(0, [1, 2], [3, STOP])
    rollouts = [
        candidate(f"r{last}", [first, call(1, [1, 2, 3, STOP, 4], [last, STOP])], 1.0, task={"n": last})
        for last in (5, 6, 7)
    ]
    assert kept(choose(rollouts)) == [f"r{last}/{k}" for last in (5, 6, 7) for k in (0, 1)]


def test_a_call_of_a_task_is_trained_once() -> None:
    first = call(0, [1, 2], [3, STOP])
    rollouts = [
        candidate(name, [first, call(1, [1, 2, 3, STOP, 4], [last, STOP])], 1.0) for name, last in (("a", 5), ("b", 6))
    ]
    chosen = choose(
        [
            *rollouts,
            candidate("c", [first], 1.0),
            candidate("d", [first, rollouts[0].attempt.trajectory.transitions[1].call], 1.0),
        ]
    )
    assert kept(chosen) == ["a/0", "a/1", "b/1"]
    assert chosen.counts["calls_left_out/duplicate"] == 2
    assert chosen.counts["rollouts_left_out/duplicate"] == 1
    check_counts(chosen)


def test_weights_come_from_rewards() -> None:
    rollouts = [candidate("a", answer(3), 0.5), candidate("b", answer(4), 0.0), candidate("c", answer(5), -1.0)]
    assert choose(rollouts[:2], weight=agl.reward()).weights == {"a/0": 0.5}
    with pytest.raises(ConfigError, match=r"weight= gives -1\.0"):
        choose(rollouts, weight=agl.reward())
    with pytest.raises(ConfigError, match="weight= gives None"):
        choose(rollouts, weight=agl.reward("none"))


def test_a_condition_that_keeps_nothing_names_what_was_seen() -> None:
    rollouts = [candidate(str(k), answer(k), k / 10, own={0: 0.25}) for k in range(5)]
    with pytest.raises(NoTrainableDataError) as caught:
        choose(rollouts, where=agl.reward() >= 1).require()
    text = str(caught.value)
    assert "nothing is left of 5 rollouts to train on (5 condition not met)" in text
    assert "reward: 0 to 0.4, mean 0.2, of 5; tool: 0.25 to 0.25" in text
    assert "where= is reward >= 1" in text
    with pytest.raises(NoTrainableDataError, match="1 cut at its limit"):
        choose([candidate("a", [call(0, [1], [2], finish="length")], 1.0)]).require()
    with pytest.raises(NoTrainableDataError, match="no rollout was found"):
        choose([]).require()


@pytest.mark.parametrize("options", [{"per_task": 0}, {"per_task": True}, {"per_task": 1.5}, {"where": "good"}])
def test_an_impossible_option_says_so(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose([], **options)
    assert caught.value.hint


@given(st.integers(0, 2**32 - 1))
def test_every_call_is_counted_and_merging_trains_what_was_kept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rollouts = [
        candidate(
            f"r{k}", random_calls(rng, int(rng.integers(1, 6))), float(rng.integers(0, 3)), task=int(rng.integers(2))
        )
        for k in range(6)
    ]
    chosen = choose(rollouts, where=agl.reward() >= 1, per_task=2)
    check_counts(chosen)
    for one in chosen.trajectories:
        rows = merge(one, chosen.weights)
        assert sum(r.n_actions for r in rows) == sum(t.call.response_ids.size for t in one.transitions)


@given(st.integers(0, 2**32 - 1))
def test_a_tree_is_written_as_chains_that_train_each_token_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chosen = choose([candidate("a", random_calls(rng, int(rng.integers(1, 8))), 1.0)])
    for one in chosen.trajectories:
        calls = [t.call for t in one.transitions]
        n_trained = 0
        for row in merge(one, chosen.weights):
            for token_ids, trained in chains(row):
                n_trained += int(trained.sum())
                assert any(
                    np.array_equal(token_ids[: c.ids.size], c.ids) and trained[c.prompt_ids.size : c.ids.size].any()
                    for c in calls
                )
        assert n_trained == sum(c.response_ids.size for c in calls)


def of_agent(rollout: str, agent: str, reward: float, token: int) -> Candidate:
    """A rollout of one call of this agent, who is the only one."""
    one = candidate(rollout, [replace(call(0, [1, 2, 3], [token, STOP]), agent=agent)], reward)
    return replace(one, attempt=replace(one.attempt, agents=(agent,)))


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_that_looks_like_a_glob_is_that_agent_in_whatever_order_they_come(order: int) -> None:
    rollouts = [of_agent("a", "worker 1", 1.0, 4), of_agent("b", "worker [1]", 1.0, 5)][::order]
    for most in (None, 1):
        chosen = choose(rollouts, agents="worker [1]", per_task=most)
        assert kept(chosen) == ["b/0"]
        check_counts(chosen)
    better = [of_agent("c", "worker [1]", 0.0, 6), *rollouts]
    assert [(p.chosen.rollout_id, p.rejected.rollout_id) for p in pairs(better, agents="worker [1]").pairs] == [
        ("b", "c")
    ]


def test_a_name_of_nobody_is_an_error_that_lists_the_agents() -> None:
    rollouts = [of_agent("a", "desk", 1.0, 4), of_agent("b", "front", 0.0, 5)]
    for method in (choose, pairs):
        with pytest.raises(NoAgentMatchedError, match=r"agents= names 'nobody', .* in 2 rollouts; .*'desk', 'front'"):
            method(rollouts, agents=["desk", "nobody"])


# -- pairs ------------------------------------------------------------------------------------------------------------


def test_the_best_is_paired_with_the_worst() -> None:
    rewards = [0.2, 1.0, 0.0, 0.5, 1.0, None]
    rollouts = [candidate(f"r{k}", answer(k), reward, at=float(k)) for k, reward in enumerate(rewards)]
    rollouts.append(candidate("other", answer(20), 1.0, task="other"))

    def ids(**options: Any) -> list[tuple[str, str]]:
        return [(p.chosen.rollout_id, p.rejected.rollout_id) for p in pairs(rollouts, **options).pairs]

    assert ids() == [("r1", "r2"), ("r4", "r0")]
    assert ids(margin=0.9) == [("r1", "r2")]
    assert ids(per_task=1) == [("r1", "r2")]
    assert ids(where=agl.reward() >= 2) == []
    assert [p.margin for p in pairs(rollouts).pairs] == [1.0, 0.8]
    counts = pairs(rollouts).counts
    assert (counts["rollouts"], counts["rollouts_paired"], counts["tasks"], counts["pairs"]) == (7, 4, 2, 2)
    assert counts["rollouts_left_out/without this reward"] == 1
    assert counts["rollouts_left_out/without a partner"] == 2


def test_equal_rollouts_and_equal_rewards_are_no_pair() -> None:
    same = [candidate("a", answer(3), 1.0), candidate("b", answer(3), 0.0), candidate("c", answer(4), 1.0)]
    with pytest.raises(NoTrainableDataError, match="no two of 3 rollouts of 1 tasks"):
        pairs(same).require()


def test_a_pair_has_what_can_be_trained() -> None:
    good = [replace(call(0, [1], [2]), finish_reason="length"), call(1, [1, 2, 3], [4, STOP])]
    bad = [replace(call(0, [1], [5]), finish_reason="length"), replace(call(1, [1, 5, 3], []), finish_reason="error")]
    (pair,) = pairs([candidate("a", good, 1.0), candidate("b", bad, 0.0)]).pairs
    assert [t.call.id for t in pair.chosen.transitions] == ["a/1"]
    assert [t.call.id for t in pair.rejected.transitions] == ["b/0"]


def test_pairs_compare_the_reward_that_is_named() -> None:
    rollouts = [candidate(str(k), answer(k), 1.0, own={0: k / 10}) for k in range(3)]
    assert pairs(rollouts).pairs == ()
    (pair,) = pairs(rollouts, by=agl.reward("tool")).pairs
    assert (pair.chosen.rollout_id, pair.rejected.rollout_id) == ("2", "0")


@pytest.mark.parametrize(
    "options", [{"margin": -1}, {"margin": "1"}, {"margin": float("nan")}, {"by": "reward"}, {"per_task": 0}]
)
def test_impossible_options_of_pairs(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        pairs([], **options)
    assert caught.value.hint


def test_the_order_of_arrival_does_not_matter_for_pairs() -> None:
    rollouts = [candidate(f"r{k}", answer(k), k % 3 / 2, at=float(k)) for k in range(5)]
    wanted = [(p.chosen.rollout_id, p.rejected.rollout_id) for p in pairs(rollouts).pairs]
    for order in itertools.permutations(rollouts):
        assert [(p.chosen.rollout_id, p.rejected.rollout_id) for p in pairs(order).pairs] == wanted
