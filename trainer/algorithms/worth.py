"""What the calls of a step are worth where some of its rollouts were chosen, and the training rows of a step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from agl.errors import NoTrainableDataError, StalePolicyError
from agl.mdp.sequence import merge
from agl.trainer.algorithms.source import Rows
from agl.trainer.objectives.advantages import FLAT, CallAdvantage, StepAdvantages
from agl.trainer.policies.policies import Policies
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.traces import Candidate, Chosen


def candidates(results: Seq[RolloutResult]) -> list[Candidate]:
    """The rollouts of a step that succeeded, to choose from."""
    return [
        Candidate(r.attempt_trajectory, r.rollout.task, r.rollout.created_at)
        for r in results
        if r.attempt_trajectory is not None
    ]


def worth_of_chosen(
    results: Seq[RolloutResult], chosen: Chosen, otherwise: str, pairs: Mapping[str, str] | None = None
) -> StepAdvantages:
    """What each call is worth where some of them were chosen: its weight.

    Args:
        results: the step's rollouts.
        chosen: of them.
        otherwise: why the others are not trained.
        pairs: `StepAdvantages.pairs`.
    """
    attempts = [(r.rollout, r.attempt_trajectory) for r in results if r.attempt_trajectory is not None]
    calls = [
        CallAdvantage(
            t.call.id,
            t.call.rollout_id,
            t.call.policy,
            t.reward,
            attempt.reward or 0.0,
            chosen.weights.get(t.call.id, 0.0),
            f"its answer was {t.call.finish_reason}"
            if not t.trainable
            else None
            if t.call.id in chosen.weights
            else otherwise,
        )
        for _, attempt in attempts
        for t in attempt.trajectory.transitions
    ]
    groups = {t.group for t in chosen.trajectories}
    return StepAdvantages(
        chosen.trajectories,
        chosen.weights,
        tuple(calls),
        dropped_groups=frozenset(),
        zero_variance_groups=frozenset(),
        flat_groups=frozenset(rollout.group for rollout, _ in attempts) - groups,
        pairs=pairs or {},
    )


def make_rows(worth: StepAdvantages, policies: Policies, step: int, max_staleness: int | None = 0) -> Rows:
    """Merge each policy's calls into training rows.

    Args:
        max_staleness: by how many updates the weights that sampled a call may be older than those in training; None
            where the calls were recorded: any weights, and none of them need have a token to train.

    Raises:
        NoTrainableDataError: no row of any policy holds a token to train, although no group was left out as flat.
        StalePolicyError: a call was sampled by weights that are more than `max_staleness` updates older than those in
            training, or by later ones.
    """
    trajectories = {name: worth.of(name) for name in policies.names}
    rows = {name: [row for t in ts for row in merge(t, worth.advantages)] for name, ts in trajectories.items()}
    if max_staleness is None:
        return rows
    flat = any(c.dropped == FLAT and c.policy in rows for c in worth.calls)
    if not flat and not any(row.n_actions for policy_rows in rows.values() for row in policy_rows):
        if worth.dropped_groups:
            why = f"{len(worth.dropped_groups)} group(s) kept no two rollouts to compare"
        else:
            why = "none of its answers is whole" if worth.calls else "its rollouts made no call"
        raise NoTrainableDataError(
            f"step {step + 1} has nothing to train on: {why}",
            hint="see why rollouts fail with agl explain, or raise max_attempts",
            step=step + 1,
        )
    for name, version in policies.versions.items():
        for call in (transition.call for t in trajectories[name] for transition in t.transitions):
            if not 0 <= version - call.policy_version <= max_staleness:
                raise StalePolicyError(
                    f"call {call.id} was sampled by version {call.policy_version} of policy {call.policy!r}, but "
                    f"version {version} is being trained and max_staleness is {max_staleness}",
                    rollout=call.rollout_id,
                    attempt=call.attempt,
                    agent=call.agent,
                    step=step + 1,
                )
    return rows
