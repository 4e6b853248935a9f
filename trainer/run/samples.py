"""Whole rollouts of a step for the loggers that ask for them, read from the store and cut to a bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agl.rewards.trace import message_line
from agl.trainer.loggers.base import Sample
from agl.trainer.store.base import Records, Store
from agl.trainer.store.types import Mode, RolloutSummary

MAX_TEXT = 20_000
"""Characters of a task or a conversation; what is longer is cut."""


async def step_samples(store: Store, run_id: str, entry: Mapping[str, Any], n: int) -> list[Sample]:
    """`n` rollouts of a step, evenly spaced among those of its training, or of its validation if it trained none.

    Args:
        entry: of the history.
    """
    step = entry["step"]
    # The store counts the steps of training from 0; a validation has the number of the steps that are done.
    places: Sequence[tuple[Mode, int]] = [("train", step - 1), ("val", step)] if step else [("val", 0), ("dev", 0)]
    for mode, place in places:
        summaries = [s for s in await store.query_step(run_id, place, mode=mode) if s.rollout.status == "succeeded"]
        if summaries:
            chosen = [summaries[i * len(summaries) // n] for i in range(min(n, len(summaries)))]
            return [await _sample(store, summary) for summary in chosen]
    return []


async def _sample(store: Records, summary: RolloutSummary) -> Sample:
    rollout = summary.rollout
    calls = await store.query_calls(rollout.rollout_id, rollout.attempts)
    messages = [
        (call.agent, message)
        for call in calls
        for message in (*call.request.get("messages", ()), call.response if call.error is None else None)
        if message
    ]
    rewards: dict[str, float] = {}
    for reward in summary.rewards:
        rewards[reward.name] = rewards.get(reward.name, 0.0) + reward.value
    return Sample(
        rollout.rollout_id,
        rollout.mode,
        _cut(json.dumps(rollout.task, ensure_ascii=False, default=str)),
        _cut("\n".join(message_line(agent, message) for agent, message in messages)),
        rewards,
        summary.reward,
        summary.advantage,
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text) - MAX_TEXT} characters left out)"
