"""The metrics of a step that verl trained: its entry in the run's history, and the numbers of every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl.mdp.sequence import merge_report
from agl.trainer.run.failures import failure_counts
from agl.trainer.run.faults import fault_counts
from agl.trainer.run.results import group_counts, mean_rewards, merge_counts
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.types import TrainedCall
from agl_verl.events import StepResult
from agl_verl.rows import GroupRows, Prompt, Row


@dataclass(frozen=True, slots=True, eq=False)
class GroupRecord:
    """A prompt, the results of its rollouts, and their rows."""

    prompt: Prompt
    results: Sequence[RolloutResult]
    rows: GroupRows


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPolicy:
    """What a step trained of one policy.

    Attributes:
        result: as verl reported it.
        groups: of the step.
        rows: that were trained, in verl's order.
    """

    result: StepResult
    groups: Sequence[GroupRecord]
    rows: Sequence[Row]


def trained_calls(trained: TrainedPolicy, policy: str) -> list[TrainedCall]:
    """The numbers of every call of the policy in a step."""
    step = trained.result.step
    position: dict[str, int] = {}
    tokens: Counter[str] = Counter()
    for i, row in enumerate(trained.rows):
        position |= dict.fromkeys(row.chain.calls, i)
        tokens.update(row.chain.tokens)
    return [
        TrainedCall(
            call_id=c.call_id,
            rollout_id=c.rollout_id,
            step=step,
            policy_version=step,
            sequence=position.get(c.call_id),
            reward=c.reward,
            return_=c.return_,
            advantage=c.advantage,
            tokens=tokens[c.call_id],
            dropped=c.dropped,
        )
        for group in trained.groups
        if group.rows.scored is not None
        for c in group.rows.scored.calls
        if c.policy == policy
    ]


def facts(step: int, policies: Mapping[str, TrainedPolicy]) -> dict[str, Any]:
    """The entry of a step in `run.history`; verl's own metrics as "verl/<name>".

    Of several policies, what is one's alone begins with its name, as in the local trainer: "<policy>/verl/<name>".

    Args:
        policies: by name. All have the groups of the same rollouts.
    """
    groups = next(iter(policies.values())).groups
    results = [r for group in groups for r in group.results]
    scored = [group.rows.scored for group in groups if group.rows.scored is not None]
    succeeded = [r for r in results if r.error is None]
    merged = merge_report([t for name in policies for s in scored for t in s.of(name)], ())
    rows = [row for trained in policies.values() for row in trained.rows]
    seconds = max(trained.result.metrics.get("timing_s/step", 0.0) for trained in policies.values())
    groups_of_step = Counter[str]()
    for group in groups:
        if group.rows.scored is not None:
            groups_of_step.update(group_counts(group.results, group.rows.scored))
    own: dict[str, Any] = {}
    for name, trained in policies.items():
        prefix = f"{name}/" if len(policies) > 1 else ""
        own[f"{prefix}policy_version"] = step
        own |= {f"{prefix}verl/{k}": v for k, v in trained.result.metrics.items()}
    return {
        "step": step,
        **mean_rewards(succeeded, "train"),
        "train/rollouts": len(results),
        "train/failed_rollouts": len(results) - len(succeeded),
        **failure_counts(results, "train"),
        **fault_counts(succeeded, "train"),
        **groups_of_step,
        **merge_counts(merged),
        "train/rows": len(rows),
        "train/tokens": sum(row.tag["seq_len"] for row in rows),
        "seconds": seconds,
        "rollouts_per_second": len(results) / max(1e-9, seconds),
        **own,
    }
