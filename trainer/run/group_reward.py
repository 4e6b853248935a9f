"""Rewards of rollouts that are compared with each other, once all rollouts of a task have ended.

It happens where the run is, with what was stored, so it is the same whichever runner executed them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agl.errors import AglError, AsException, ConfigError, JudgeError, RewardError, UserCodeError, described
from agl.mdp.span_index import SpanIndex
from agl.rewards.air import reward_spans
from agl.rewards.arguments import GROUP_REWARD, Arguments
from agl.rewards.emit import as_rewards
from agl.rewards.function import GroupReward, is_group_reward
from agl.rewards.trace import Trace
from agl.tracing import main_thread
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import Records

SOURCE = "group"
"""The source of these rewards."""


def require_group_reward(value: Any, *, capture_content: bool) -> None:
    """Check `Trainer(group_reward=)`.

    Raises:
        ConfigError: it is none, or there is nothing for it to read.
    """
    if value is None:
        return
    if not is_group_reward(value):
        raise ConfigError(
            f"group_reward= is {value!r}",
            hint="for example agl.rewards.RankJudge(model); a function (task, output) is reward= of agl.wrap",
        )
    Arguments.of(value.score, GROUP_REWARD)
    if not capture_content:
        raise ConfigError(
            "group_reward= reads the agents' texts, which capture_content=False does not record",
            hint="leave capture_content on",
        )


async def score_group(store: Records, reward: GroupReward, results: Sequence[RolloutResult]) -> list[RolloutResult]:
    """A group's results with their rewards, which are in the store then. Those that a stopped run had scored stay.

    Returns:
        The results. Where the group cannot be scored, those that had succeeded have an error that says why.

    Raises:
        JudgeError: nothing can be scored now.
        UserCodeError: the group reward raised something else.
        StoreError: the rewards cannot be stored.
    """
    # One that a policy has ended has no result to compare: it gets the lowest reward afterwards.
    succeeded = [r for r in results if r.attempt_trajectory is not None and r.attempt_trajectory.fault is None]
    if all(_is_scored(r) for r in succeeded):
        return list(results)
    recorded = [
        (
            await store.query_spans(r.rollout.rollout_id, r.attempt),
            await store.query_calls(r.rollout.rollout_id, r.attempt),
        )
        for r in succeeded
    ]
    # Off the event loop: long conversations take a while.
    traces = await asyncio.to_thread(
        lambda: [
            Trace.of_attempt(r.rollout.rollout_id, r.attempt, spans, calls)
            for r, (spans, calls) in zip(succeeded, recorded, strict=True)
        ]
    )
    first = succeeded[0].rollout
    where = {"step": None if first.step is None else first.step + 1, "group": first.group}
    try:
        positional, named = Arguments.of(reward.score, GROUP_REWARD).bind({"task": first.task, "traces": traces})
        with main_thread.watched_outside():
            try:
                with AsException():
                    scores = await reward.score(*positional, **named)
                main_thread.require_none_refused(f"group_reward={reward.label}", **where)
            except Exception as error:
                main_thread.require_none_refused(f"group_reward={reward.label}", error, **where)
                if isinstance(error, AglError):
                    raise
                raise UserCodeError(
                    f"group_reward={reward.label} raised {described(error)}",
                    hint="correct it, then resume the run with resume=True: what has ended is kept",
                    **where,
                ) from error
        if len(scores) != len(traces):
            raise RewardError(f"{reward.label} gave {len(scores)} scores for {len(traces)} rollouts")
        scored = [as_rewards(score, source=SOURCE) for score in scores]
    except JudgeError as error:
        raise JudgeError(
            error.message, hint=f"{error.hint or 'see to it'} Then resume: what has ended is kept", **where
        ) from error
    except RewardError as error:
        dropped = RewardError(error.message, hint=error.hint, **where)
        return [
            r if r.attempt_trajectory is None else replace(r, attempt_trajectory=None, error=dropped) for r in results
        ]
    spans = []
    rewarded = {}
    for result, rewards, (of_attempt, calls) in zip(succeeded, scored, recorded, strict=True):
        assert result.attempt_trajectory is not None
        if _is_scored(result):
            continue
        index = SpanIndex(calls, of_attempt)
        root = index.root.span_id if index.root else None
        credited = [
            (replace(r, name=reward.label if r.name == "reward" else r.name, span_id=root), None) for r in rewards
        ]
        spans += reward_spans(credited, index)
        rewarded[result.rollout.rollout_id] = replace(
            result, attempt_trajectory=result.attempt_trajectory.with_rewards(credited)
        )
    # All at once, so that a run that is stopped now has scored this group or not.
    await store.add_spans(spans)
    return [rewarded.get(r.rollout.rollout_id, r) for r in results]


def _is_scored(result: RolloutResult) -> bool:
    trajectory = result.attempt_trajectory
    return trajectory is not None and any(reward.source == SOURCE for reward, _ in trajectory.credited)
