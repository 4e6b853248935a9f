"""verl's rows: chains that train each sampled token once, in its own context, with the numbers of the merged row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from call_trees import call, trajectories, trajectory
from hypothesis import given, settings
from verl_rows import result

from agl.credit import Discounted, PerCall, Uniform
from agl.mdp.sequence import merge
from agl.mdp.types import Reward, Trajectory
from agl_verl.rows import ADVANTAGES, Prompt, chains, train_rows, val_rows

PROMPT = Prompt("u-1", 3, 4, 7, False)


@settings(max_examples=200, deadline=None)
@given(trajectories())
def test_each_trained_token_is_in_one_chain_with_its_context_and_numbers(t: Trajectory) -> None:
    advantages = {x.call.id: 0.5 + x.call.index for x in t.transitions}
    returns = {x.call.id: 2.0 * x.call.index - 3 for x in t.transitions}
    found: dict[str, list[tuple[int, ...]]] = {x.call.id: [] for x in t.transitions}
    for row in merge(t, advantages):
        for chain in chains(row, returns):
            assert chain.prompt_ids.size >= 1
            assert chain.response_mask[0]
            assert chain.ids.size == chain.prompt_ids.size + chain.response_mask.size
            assert not chain.advantages[~chain.response_mask].any()
            assert not chain.logprobs[~chain.response_mask].any()
            assert sum(chain.tokens.values()) == chain.response_mask.sum()
            ids = chain.ids.tolist()
            to_go = np.cumsum(chain.rewards[::-1])[::-1]
            for i in np.flatnonzero(chain.response_mask).tolist():
                # Advantages and log-probs differ from call to call, so they tell whose the token is.
                [x] = [x for x in t.transitions if np.float32(advantages[x.call.id]) == chain.advantages[i]]
                assert x.trainable
                assert x.call.id in chain.tokens
                context = tuple(ids[: chain.prompt_ids.size + i + 1])
                found[x.call.id].append(context)
                place = len(context) - 1 - x.call.prompt_ids.size
                assert chain.logprobs[i] == x.call.logprobs[place]
                assert abs(to_go[i] - returns[x.call.id]) < 1e-5
    for x in t.transitions:
        whole = x.call.ids.tolist()
        n = x.call.prompt_ids.size
        due = [tuple(whole[: n + k + 1]) for k in range(x.call.response_ids.size)] if x.trainable else []
        assert sorted(found[x.call.id]) == sorted(due)


def test_a_conversation_that_grows_is_one_row_and_a_fork_is_two() -> None:
    asked = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]), ([1, 2, 3, 9], [8])]
    both = [trajectory([call(i, *ids, rollout=r) for i, ids in enumerate(asked)], r) for r in "ab"]
    group = train_rows(
        PROMPT, [result(t, k) for k, t in enumerate(both)], Uniform(), policy="policy", estimator="grpo",
        normalize_std=True, own=True,
    )  # fmt: skip
    assert [row.key for row in group.rows] == ["u-1_0_0", "u-1_0_1", "u-1_1_0", "u-1_1_1"]
    one, two = group.rows[:2]
    assert one.fields["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert one.fields["prompts"].tolist() == [1, 2, 3]
    assert one.fields["response_mask"].tolist() == [1, 1, 0, 1]
    assert two.fields["input_ids"].tolist() == [1, 2, 3, 9, 8]
    assert two.fields["response_mask"].tolist() == [1]
    assert one.tag["global_steps"] == 7
    assert one.tag["seq_len"] == 7
    assert one.fields["uid"] == "u-1_0_0", "by which our estimator finds the row's advantages"


def test_one_reward_is_its_own_calls_alone() -> None:
    """Without division by the group's deviation: the call that earned it stands out of its group, and only that one."""
    plain = [trajectory([call(0, [1], [2, 3], rollout=r), call(1, [1, 2, 3, 4], [5], rollout=r)], r) for r in "abcd"]
    earned = replace(plain[1].transitions[1], rewards=(Reward("reward", 1.0),))
    rewarded = [plain[0], replace(plain[1], transitions=(plain[1].transitions[0], earned)), *plain[2:]]

    def of(ts: list[Trajectory]) -> dict[str, list[float]]:
        group = train_rows(
            PROMPT, [result(t, k) for k, t in enumerate(ts)], PerCall(), policy="policy", estimator="grpo",
            normalize_std=False, own=True,
        )  # fmt: skip
        return {row.key: row.fields[ADVANTAGES].tolist() for row in group.rows}

    before, after = of(plain), of(rewarded)
    assert all(not any(row) for row in before.values())
    # A rollout counts once in its group, with the mean of its calls: half a reward in one of four.
    assert after["u-1_1_0"] == [-0.125, -0.125, 0.0, 0.875]
    assert all(after[f"u-1_{k}_0"] == [-0.125, -0.125, 0.0, -0.125] for k in (0, 2, 3))


def test_for_verls_own_estimators_the_reward_to_go_is_the_calls_return() -> None:
    t = trajectory([call(0, [1], [2, 3]), call(1, [1, 2, 3, 4], [5, 6])])
    t = replace(t, rewards=(Reward("reward", 1.0),))
    group = train_rows(
        PROMPT, [result(t)], Discounted(0.5), policy="policy", estimator="gae", normalize_std=True, own=False
    )
    [row] = group.rows
    assert row.fields["uid"] == "u-1"
    assert row.fields["rm_scores"].tolist() == [0.0, -0.5, 0.0, 0.0, 1.0]


def test_failed_rollouts_have_no_rows_and_a_group_of_one_none_at_all() -> None:
    good = result(trajectory([call(0, [1], [2], rollout="a")], "a"))
    failed = replace(
        result(trajectory([call(0, [1], [2], rollout="b")], "b"), 1), attempt_trajectory=None, error=RuntimeError("no")
    )
    common = dict(policy="policy", normalize_std=True)
    group = train_rows(PROMPT, [good, failed], Uniform(), estimator="grpo", own=True, **common)
    assert group.rows == ()
    assert group.scored is not None
    assert {c.dropped for c in group.scored.calls} == {"its group has no other rollout to compare with"}
    assert len(train_rows(PROMPT, [good, failed], Uniform(), estimator="gae", own=False, **common).rows) == 1


def test_a_validation_has_one_row_per_rollout_with_its_reward() -> None:
    t = replace(trajectory([call(0, [1], [2, 3]), call(1, [1, 2, 3, 4], [5])]), rewards=(Reward("reward", 0.25),))
    group = val_rows(replace(PROMPT, validate=True), [result(t)], policy="policy")
    [row] = group.rows
    assert row.key == "u-1_0_0"
    assert row.fields["uid"] == "u-1"
    assert row.fields["rm_scores"].sum() == 0.25
    assert row.fields["num_turns"] == 4


def test_weights_that_changed_within_a_rollout_show_in_its_rows() -> None:
    """verl's staleness rules go by the oldest and newest weights of a row."""
    calls = [replace(call(0, [1], [2], rollout=r), policy_version=4) for r in "ab"]
    group = train_rows(
        PROMPT, [result(trajectory([c], c.rollout_id), k) for k, c in enumerate(calls)], Uniform(), policy="policy",
        estimator="grpo", normalize_std=True, own=True, newest=lambda c: 6 if c.rollout_id == "b" else 4,
    )  # fmt: skip
    assert [(row.tag["min_global_steps"], row.tag["max_global_steps"]) for row in group.rows] == [(4, 4), (4, 6)]
    assert group.rows[1].fields["extra_fields"]["max_global_steps"] == 6
