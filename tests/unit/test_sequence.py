"""Merging: each sampled token is trained once, in its own context, and a conversation that only grows is one chain."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
from call_trees import call, trajectories, trajectory
from hypothesis import given, settings

from agl.mdp.sequence import MIN_SHARED, TrainingRow, merge, merge_report, unmerged
from agl.mdp.types import Trajectory


def advantages(t: Trajectory) -> dict[str, float]:
    """Another advantage for each call."""
    return {x.call.id: 0.5 + x.call.index for x in t.transitions}


def walk(row: TrainingRow, token: int) -> list[int]:
    """Row indices from the first token of a token's context to the token itself."""
    path = []
    while token >= 0:
        path.append(token)
        token = int(row.parents[token])
    return path[::-1]


def sampled(rows: Sequence[TrainingRow], call_id: str) -> tuple[TrainingRow, np.ndarray]:
    """The row that holds a call's sampled tokens, and where."""
    ((row, where),) = [
        (row, np.flatnonzero(row.calls == row.call_ids.index(call_id))) for row in rows if call_id in row.call_ids
    ]
    return row, where


@settings(max_examples=200, deadline=None)
@given(trajectories())
def test_each_sampled_token_of_a_trainable_call_is_trained_once_with_its_own_numbers(t: Trajectory):
    given_advantages = advantages(t)
    rows = merge(t, given_advantages)
    assert sorted(c for row in rows for c in row.call_ids) == sorted(x.call.id for x in t.transitions)
    for x in t.transitions:
        row, where = sampled(rows, x.call.id)
        np.testing.assert_array_equal(row.token_ids[where], x.call.response_ids)
        assert row.action_mask[where].all() == x.trainable or not where.size
        if x.trainable:
            np.testing.assert_array_equal(row.logprobs[where], x.call.logprobs)
            np.testing.assert_array_equal(row.advantages[where], np.float32(given_advantages[x.call.id]))
            np.testing.assert_array_equal(row.temperatures[where], np.float32(x.call.temperature))
    expected = sum(x.call.response_ids.size for x in t.transitions if x.trainable)
    assert sum(row.n_actions for row in rows) == expected
    for row in rows:
        untrained = ~row.action_mask
        assert (row.calls[row.action_mask] >= 0).all()
        assert not row.logprobs[untrained].any()
        assert not row.advantages[untrained].any()
        assert not row.weights[untrained].any()


@settings(max_examples=200, deadline=None)
@given(trajectories())
def test_walking_up_from_a_call_spells_its_prompt_and_response(t: Trajectory):
    rows = merge(t, advantages(t))
    for row in rows:
        assert (row.parents < np.arange(len(row))).all()
        depth = np.where(row.parents < 0, 0, row.positions[row.parents] + 1)
        np.testing.assert_array_equal(row.positions, depth)
    for x in t.transitions:
        row, where = sampled(rows, x.call.id)
        if where.size:
            np.testing.assert_array_equal(row.token_ids[walk(row, int(where[-1]))], x.call.ids)


@settings(max_examples=100, deadline=None)
@given(trajectories())
def test_merging_never_forwards_more_tokens_or_rows_than_not_merging(t: Trajectory):
    rows, apart = merge(t, advantages(t)), unmerged(t, advantages(t))
    report = merge_report([t], rows)
    assert report.calls == len(apart)
    assert report.rows == len(rows) <= len(apart)
    assert report.tokens == sum(map(len, rows)) <= sum(map(len, apart)) == report.tokens_unmerged
    assert all(row.is_chain for row in apart)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two contexts share."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=300, deadline=None)
@given(trajectories())
def test_a_call_joins_the_row_that_a_comparison_with_all_calls_finds(t: Trajectory):
    rows: list[list[int]] = []
    ids = [x.call.ids.tolist() for x in t.transitions]
    for k, x in enumerate(t.transitions):
        home, most = None, 0
        for row in rows:
            prompt = x.call.prompt_ids.tolist()
            shared = max(common(prompt, ids[i]) for i in row)
            extends = any(common(prompt, ids[i]) == len(ids[i]) for i in row)
            if shared > most and (extends or shared >= MIN_SHARED):
                home, most = row, shared
        if home is None:
            rows.append(home := [])
        home.append(k)
    expected = [tuple(t.transitions[k].call.id for k in row) for row in rows]
    assert [row.call_ids for row in merge(t, advantages(t))] == expected


SYSTEM = list(range(100, 100 + 2 * MIN_SHARED))
MANY = {
    "the same call": lambda k: (SYSTEM, [7, 8, 9]),
    "other answers": lambda k: (SYSTEM, [1000 + k, 9]),
    "other questions": lambda k: ([*SYSTEM, 1000 + k, 5], [7, 8, 9]),
    "little in common": lambda k: ([5, 6, 1000 + k, *SYSTEM], [7, 8, 9]),
    "tiny calls": lambda k: ([5, 6], [7]),
    "the same dialogue": lambda k: ([*SYSTEM, *[7, 8, 9, 5][: 4 * (k % 2)]], [7, 8, 9]),
    "answers that begin alike": lambda k: ([*SYSTEM, *[7, 1000 + k // 2, 5][: 3 * (k % 2)]], [7, 1000 + k // 2, 6]),
}


@pytest.mark.parametrize("kind", MANY)
def test_many_calls_take_time_linear_in_them(kind: str):
    """4,000 calls of one rollout once took a minute, in which all others waited."""

    def operations(n: int) -> int:
        t = trajectory([call(k, *MANY[kind](k)) for k in range(n)])
        count = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            merge(t, dict.fromkeys((x.call.id for x in t.transitions), 1.0))
        finally:
            sys.setprofile(None)
        return count

    assert operations(400) <= 2.2 * operations(200)


def test_a_conversation_that_only_grows_is_one_chain_of_its_own_length():
    calls, history = [], [1, 2, 3]
    for k in range(6):
        calls.append(call(k, history, [10 + k, 4]))
        history = [*history, 10 + k, 4, 5, 6]
    (row,) = merge(trajectory(calls), advantages(trajectory(calls)))
    assert row.is_chain
    np.testing.assert_array_equal(row.token_ids, calls[-1].ids)
    assert row.n_actions == 12


def test_two_samples_of_one_prompt_stay_two_decisions_though_they_read_the_same():
    prompt = list(range(20))
    t = trajectory([call(0, prompt, [7, 8]), call(1, prompt, [7, 8])])
    (row,) = merge(t, {"r/0": 1.0, "r/1": -1.0})
    assert len(row) == 24
    assert row.advantages[row.action_mask].tolist() == [1.0, 1.0, -1.0, -1.0]
    assert row.parents[[20, 22]].tolist() == [19, 19]
    assert not row.is_chain


def test_interleaved_sub_agents_with_one_system_prompt_share_it():
    system = list(range(30, 30 + MIN_SHARED))
    a, b = [*system, 1], [*system, 2]
    t = trajectory([call(0, a, [5]), call(1, b, [6]), call(2, [*a, 5, 9], [7]), call(3, [*b, 6, 9], [8])])
    (row,) = merge(t, advantages(t))
    assert len(row) == MIN_SHARED + 2 * 4


def test_contexts_that_share_little_get_rows_of_their_own():
    t = trajectory([call(0, [1, 2], [3]), call(1, [1, 9], [3])])
    assert len(merge(t, advantages(t))) == 2


def test_a_call_joins_the_conversation_it_extends_also_when_another_shares_as_much():
    t = trajectory([call(0, [1, 2, 3], [4, 5]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3, 4, 9], [6])])
    rows = merge(t, advantages(t))
    assert sum(map(len, rows)) == 5 + 4 + 2


def test_a_call_joins_the_row_of_the_call_it_extends_also_when_it_shares_more_with_a_third():
    t = trajectory([call(0, [1], [2]), call(1, [1, 2], [3, 4]), call(2, [1, 2, 3], [5])])
    (row,) = merge(t, advantages(t))
    assert len(row) == 5


def test_a_cancelled_answer_is_context_for_the_next_call_but_not_trained():
    t = trajectory([call(0, [1, 2], [3, 4], finish="cancelled"), call(1, [1, 2, 3, 4, 5], [6])])
    (row,) = merge(t, advantages(t))
    assert row.is_chain
    assert row.token_ids[row.action_mask].tolist() == [6]


def test_a_call_without_an_advantage_is_an_error():
    with pytest.raises(KeyError):
        merge(trajectory([call(0, [1], [2])]), {})
