"""The reward of rollouts that a policy itself has ended, once all rollouts that they are compared with have ended.

It happens where the run is, with what was stored, so it is the same whichever runner executed them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from agl.credit import Competitive, Credit, PerCall, own_reward, returns
from agl.mdp.builder import AttemptTrajectory, CreditedReward
from agl.mdp.faults import CAUSES, Fault
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Reward
from agl.rewards.air import reward_spans
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import Records
from agl.trainer.store.types import Mode

SOURCE = "fault"
"""The source of these rewards."""
NAME = "policy_fault"


async def score_faults(
    store: Records, credit: Credit, results: Sequence[RolloutResult], mode: Mode
) -> list[RolloutResult]:
    """The results, in which each rollout that a policy has ended has a reward; it is in the store then.

    With what it had earned before, it is the lowest reward of the rollout's group: of those of its rollouts that no
    policy has ended, else of all these rollouts, else 0; or less, if penalties had come to less. In training, that is:
    in a measurement (any other mode) it is 0 at most. Those that have a reward (`error_reward=`, or a stopped run had
    scored them) keep it.

    The reward is the whole rollout's. Two credit rules give such a reward to nobody: for `PerCall` it is that of the
    call whose answer it was, next to the calls of the same agent, and for `Competitive` that agent's own.

    Args:
        results: of whole groups.

    Raises:
        StoreError: the rewards cannot be stored.
    """
    to_score = [r for r in results if fault_of(r) is not None and not _is_scored(r)]
    if not to_score:
        return list(results)
    peers: dict[str | None, list[AttemptTrajectory]] = defaultdict(list)
    for r in results:
        if r.attempt_trajectory is not None and r.attempt_trajectory.fault is None:
            peers[r.rollout.group].append(r.attempt_trajectory)
            peers[None].append(r.attempt_trajectory)
    scored = {}
    spans = list[Span]()
    for result in to_score:
        trajectory = result.attempt_trajectory
        assert trajectory is not None
        assert trajectory.fault is not None
        group = peers[result.rollout.group] or peers[None]
        credited = _lowest(credit, trajectory, trajectory.fault, group, measured=mode != "train")
        id = result.rollout.rollout_id
        index = SpanIndex(await store.query_calls(id, result.attempt), await store.query_spans(id, result.attempt))
        spans += reward_spans([credited], index)
        scored[id] = replace(result, attempt_trajectory=trajectory.with_rewards([credited]))
    await store.add_spans(spans)
    return [scored.get(r.rollout.rollout_id, r) for r in results]


def _lowest(
    credit: Credit, trajectory: AttemptTrajectory, fault: Fault, peers: Sequence[AttemptTrajectory], *, measured: bool
) -> CreditedReward:
    """The reward that makes this rollout the lowest of them, and the call that earned it."""

    def values(of: AttemptTrajectory, call_id: str | None = None) -> list[float]:
        if isinstance(credit, PerCall):
            calls = zip(of.trajectory.transitions, returns(credit, of.trajectory), strict=True)
            return [v for t, v in calls if t.call.agent == fault.agent and call_id in (None, t.call.id)]
        if isinstance(credit, Competitive):
            return [own_reward(of.trajectory, fault.agent)]
        return [of.trajectory.total_reward]

    [earned] = values(trajectory, fault.call_id)
    others = [value for peer in peers for value in values(peer)] or [0.0]
    # Penalties that it had before stay: a failure never raises a reward.
    lowest = min(*others, min(earned, 0.0) if earned < 0 or measured else math.inf)
    agent = fault.agent if isinstance(credit, Competitive) else None
    reward = Reward(NAME, lowest - earned, source=SOURCE, agent=agent)
    return reward, fault.call_id if isinstance(credit, PerCall) else None


def fault_of(result: RolloutResult) -> Fault | None:
    """What a policy caused in a rollout, if it has ended it."""
    return None if result.attempt_trajectory is None else result.attempt_trajectory.fault


def fault_counts(results: Sequence[RolloutResult], mode: str) -> dict[str, int]:
    """How many rollouts policies have ended, for `run.history`: "<mode>/policy_faults", and by cause below it."""
    causes = Counter(fault.cause for r in results if (fault := fault_of(r)) is not None)
    by_cause = {f"{mode}/policy_faults/{cause}": causes[cause] for cause in CAUSES}
    return {f"{mode}/policy_faults": causes.total(), **by_cause}


def hopeless_groups(results: Sequence[RolloutResult]) -> dict[str, dict[str, Fault]]:
    """The groups in which policies have ended every rollout that did not fail otherwise, so that there is no other to
    compare with: the faults, by the rollouts' ids."""
    faults: dict[str, dict[str, Fault | None]] = defaultdict(dict)
    for r in results:
        if r.attempt_trajectory is not None:
            faults[r.rollout.group][r.rollout.rollout_id] = r.attempt_trajectory.fault
    return {g: {i: f for i, f in of.items() if f is not None} for g, of in faults.items() if all(of.values())}


def _is_scored(result: RolloutResult) -> bool:
    trajectory = result.attempt_trajectory
    return trajectory is not None and any(reward.source in ("return", SOURCE) for reward, _ in trajectory.credited)
