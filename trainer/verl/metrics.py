"""What a run keeps of a step that verl trained: its facts for the history, and the numbers of every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agl.mdp.sequence import merge_report
from agl.trainer.run.run import mean_rewards, require_some
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import TrainedCall
from agl.trainer.verl.events import Stepped
from agl.trainer.verl.rows import Group, Prompt, Row


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A prompt, its rollouts, and what they came to."""

    prompt: Prompt
    results: Sequence[RolloutResult]
    group: Group


def trained_calls(done: Stepped, groups: Sequence[Seen], rows: Sequence[Row], policy: str) -> list[TrainedCall]:
    """The numbers of every call of a step.

    Args:
        groups: of the step. rows: those that were trained, in verl's order.
    """
    place: dict[str, int] = {}
    tokens: Counter[str] = Counter()
    for i, row in enumerate(rows):
        place |= dict.fromkeys(row.chain.calls, i)
        tokens.update(row.chain.tokens)
    return [
        TrainedCall(
            call_id=c.call_id, rollout_id=c.rollout_id, step=done.step, policy_version=done.step,
            sequence=place.get(c.call_id), reward=c.reward, return_=c.return_, advantage=c.advantage,
            tokens=tokens[c.call_id], dropped=c.dropped,
        )
        for seen in groups if seen.group.scored is not None
        for c in seen.group.scored.calls if c.policy == policy
    ]  # fmt: skip


def validation(results: Sequence[RolloutResult]) -> dict[str, Any]:
    """What its rollouts earned on average. Raises what the first one failed of, where all did."""
    good = require_some(results, "the validation")
    return {**mean_rewards(good, "val"), "val/failed_rollouts": len(results) - len(good)}


def facts(done: Stepped, groups: Sequence[Seen], rows: Sequence[Row], policy: str) -> dict[str, Any]:
    """The entry of a step in `run.history`; verl's own metrics as "verl/<name>"."""
    results = [r for seen in groups for r in seen.results]
    scored = [seen.group.scored for seen in groups if seen.group.scored is not None]
    good = [r for r in results if r.error is None]
    merged = merge_report([t for s in scored for t in s.of(policy)], ())
    seconds = done.metrics.get("timing_s/step", 0.0)
    return {
        "step": done.step,
        **mean_rewards(good, "train"),
        "train/rollouts": len(results),
        "train/failed_rollouts": len(results) - len(good),
        "train/dropped_groups": sum(s.dropped_groups for s in scored),
        "train/zero_variance_groups": sum(s.zero_variance_groups for s in scored),
        "train/calls": merged.calls,
        "train/rows": len(rows),
        "train/tokens": sum(row.tag["seq_len"] for row in rows),
        "train/tokens_unmerged": merged.tokens_unmerged,
        "train/forks": sum(merged.forks.values()),
        "policy_version": done.step,
        "seconds": seconds,
        "rollouts_per_second": len(results) / max(1e-9, seconds),
        **{f"verl/{k}": v for k, v in done.metrics.items()},
    }
