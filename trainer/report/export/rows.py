"""Reads rollouts with everything a store has of them, one at a time, and makes the plain records that are exported."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.tracing.inferred import completed
from agl.trainer.report.trace_tree import as_json
from agl.trainer.store.base import Rollouts, Store
from agl.trainer.store.types import Attempt, Mode, Rollout, TrainedCall

PAGE = 200
"""Number of rollouts that one query reads."""


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Conditions on the exported rollouts; None is no condition. `since`: enqueued at that time or later, in seconds
    since the epoch."""

    run_id: str | None = None
    mode: Mode | None = None
    since: float | None = None

    async def count(self, store: Rollouts) -> int:
        """The number of matching rollouts."""
        return await store.count_rollouts(run_id=self.run_id, mode=self.mode, since=self.since)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A rollout with its attempts, calls and spans, and the training records of its calls.

    `spans` are completed: calls and tools for which the clients made no span have one, too.
    """

    rollout: Rollout
    attempts: Sequence[Attempt]
    spans: Sequence[Span]
    calls: Sequence[Call]
    trained: Sequence[TrainedCall]

    @property
    def agent(self) -> str | None:
        """The outermost agent of the last attempt that has a root span."""
        roots = [s for s in self.spans if s.parent_id is None and s.agent]
        return max(roots, key=lambda s: s.attempt).agent if roots else None


async def records(store: Store, filter: RolloutFilter, limit: int) -> AsyncIterator[Record]:
    """The first `limit` rollouts, oldest first; one of them is in memory at a time.

    With `RolloutFilter.count` as the limit, the export of a run that still continues ends, too.
    """
    after: str | None = None
    while limit > 0:
        page = await store.query_rollouts(
            run_id=filter.run_id, mode=filter.mode, since=filter.since, after=after, limit=min(PAGE, limit)
        )
        for rollout in page:
            yield await record(store, rollout)
        if not page:
            return
        limit = limit - len(page)
        after = page[-1].rollout_id


async def record(store: Store, rollout: Rollout) -> Record:
    """Everything that the store has of one rollout."""
    attempts = await store.query_attempts(rollout.rollout_id)
    stored = await store.query_spans(rollout.rollout_id)
    calls = await store.query_calls(rollout.rollout_id)
    numbers = sorted({x.attempt for x in (*stored, *calls)})
    spans = [
        span
        for number in numbers
        for span in completed([s for s in stored if s.attempt == number], [c for c in calls if c.attempt == number])
    ]
    return Record(rollout, attempts, spans, calls, await store.query_trained_calls(rollout.rollout_id))


def rollout_record(record: Record) -> dict[str, Any]:
    """The rollout: its fields, attempts, rewards and training records.

    `reward` is the sum of the last attempt's primary rewards, None without any. `rewards` has those of every attempt,
    each with the call that it was credited to, None for the whole rollout. Times are seconds since the epoch.
    """
    rewards, reward = _rewards(record)
    trained = map(dataclasses.asdict, record.trained)
    fields = {f.name: getattr(record.rollout, f.name) for f in dataclasses.fields(Rollout) if f.name != "attempts"}
    return {
        **fields,
        "config": dataclasses.asdict(record.rollout.config),
        "agent": record.agent,
        "reward": reward,
        "rewards": rewards,
        "attempts": [dataclasses.asdict(a) for a in record.attempts],
        "trained": [{"return" if k == "return_" else k: v for k, v in t.items()} for t in trained],
    }


def span_records(record: Record) -> list[dict[str, Any]]:
    """The spans, as in `agl trace show --json`."""
    return [as_json(span) for span in record.spans]


def call_records(record: Record, *, tokens: bool) -> list[dict[str, Any]]:
    """The calls: agents, messages, token counts; with `tokens` also the token ids (int32 [P] and [R]) and the log-probs
    of the sampled ones (float32 [R])."""
    names = [
        f.name for f in dataclasses.fields(Call) if tokens or f.name not in ("prompt_ids", "response_ids", "logprobs")
    ]
    return [
        {name: getattr(call, name) for name in names}
        | {"prompt_tokens": int(call.prompt_ids.size), "response_tokens": int(call.response_ids.size)}
        for call in record.calls
    ]


def _rewards(record: Record) -> tuple[list[dict[str, Any]], float | None]:
    rewards: list[dict[str, Any]] = []
    total = None
    for attempt in record.attempts:
        calls = [c for c in record.calls if c.attempt == attempt.attempt]
        spans = [s for s in record.spans if s.attempt == attempt.attempt]
        index = SpanIndex(calls, spans)
        trajectory = build_trajectory(record.rollout.rollout_id, attempt.attempt, record.rollout.group, index, select())
        total = trajectory.reward
        for reward, call_id in trajectory.credited:
            rewards.append({"attempt": attempt.attempt, "call_id": call_id, **dataclasses.asdict(reward)})
    return rewards, total
