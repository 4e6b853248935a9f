"""Steps that sample: rollouts of some tasks, what each of their calls is worth, and an update of the policies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from agl.errors import NoTrainableDataError, StalePolicyError
from agl.mdp.sequence import TrainingRow, merge
from agl.trainer.algorithms.trained_calls import Rows, Sample, facts, record
from agl.trainer.algorithms.training import LocalTraining, PrepareNext, Steps, publish
from agl.trainer.objectives.advantages import FLAT, CallAdvantage, StepAdvantages
from agl.trainer.policies.policies import Policies
from agl.trainer.run.batches import Batches
from agl.trainer.run.faults import hopeless_groups
from agl.trainer.run.run import Run, require_some, require_tasks
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.traces import Candidate, Chosen

HEAD_START = 1.0
"""How many seconds before the expected end of an update the next step's rollouts begin."""


class SampledSteps(Steps[Sample]):
    """Steps of an algorithm that learns from what the policies have just sampled.

    Args:
        settings: of the algorithm. run: the run, which has training tasks.
        batch_size: tasks per step; None = all of them. group_size: rollouts per task.
        total: steps of the run; None = what the settings say.
        max_staleness: by how many updates the weights that sampled may be older.

    Raises:
        DatasetError: there is no training task.
    """

    why_flat = "all rollouts of each task had the same return"
    """Why a step with rollouts has nothing to learn from, for people."""

    def __init__(
        self,
        settings: LocalTraining,
        run: Run,
        *,
        batch_size: int | None,
        group_size: int,
        total: int | None = None,
        max_staleness: int = 0,
    ) -> None:
        require_tasks(run.train, "the training dataset")
        self.group_size = group_size
        self.batches = Batches(run.train, batch_size or len(run.train), run.seed)
        total = total or settings.steps or self.batches.steps_per_epoch() * (settings.epochs or 1)
        super().__init__(settings, run, total)
        self.max_staleness, self.ahead = max_staleness, bool(max_staleness)
        self._update_seconds = 0.0
        self._served_at = 0.0
        self._no_update = asyncio.Event()
        self._no_update.set()

    @abstractmethod
    def advantages(self, results: Seq[RolloutResult], step: int) -> StepAdvantages:
        """What each call of these rollouts is worth."""

    def learns(self, rows: Seq[TrainingRow]) -> bool:
        """Whether an update on these rows would change the policy."""
        return any(row.n_actions and np.any(row.advantages) for row in rows)

    async def sample(self, step: int) -> tuple[list[RolloutResult], int]:
        """The step's rollouts, and how many tasks were sampled in place of useless ones."""
        return await self.rollouts(self.batches.indices(step), step), 0

    async def rollouts(self, indices: Seq[int], step: int, first: int = 0) -> list[RolloutResult]:
        """Rollouts of the tasks with these indices; `first`: place of the first task, when the step has had others."""
        return await self.run.rollouts(
            [(i, self.run.train[i]) for i in indices],
            mode="train",
            step=step,
            group_size=self.group_size,
            metadata=self.settings.metadata(self.run),
            first=first,
        )

    async def rows(self, policies: Policies, sample: Sample, step: int) -> Rows:
        """The step's training rows. Raises as `make_rows`."""
        # Off the event loop: long rollouts take seconds.
        return await asyncio.to_thread(make_rows, sample, policies, step, self.max_staleness)

    async def prepare(self, policies: Policies, step: int) -> Sample:
        """The step's rollouts and what their calls are worth.

        Raises:
            AglError: all rollouts failed.
        """
        began, earlier = time.monotonic(), policies.prompt_tokens
        results, resampled = await self.sample(step)
        # Rollouts that call no policy can end before the last update has.
        await self._no_update.wait()
        succeeded = require_some(results, f"step {step + 1}")
        advantages = self.advantages(results, step)
        # A policy without a call: its pattern matches no agent's name, or its agent is seldom called.
        agents = dict.fromkeys(
            a for r in succeeded if r.attempt_trajectory is not None for a in r.attempt_trajectory.agents
        )
        for name in self.run.selection.policies:
            if all(c.policy != name for c in advantages.calls):
                self.run.progress.note(
                    f"step {step + 1}: no agent of policy {name!r} was called; agents seen: {', '.join(agents)}"
                )
        skipped = {g: faults for g, faults in hopeless_groups(results).items() if g in advantages.flat_groups}
        if skipped:
            causes = Counter(fault.cause for faults in skipped.values() for fault in faults)
            self.run.progress.note(
                f"step {step + 1}: {len(skipped)} group(s) skipped, as the policy itself ended every rollout "
                f"({', '.join(f'{n} {cause}' for cause, n in causes.items())}); the first: "
                f"{next(iter(skipped.values()))[0]}"
            )
        prompt_tokens = policies.prompt_tokens - earlier
        seconds = time.monotonic() - max(began, self._served_at)
        return Sample(results, succeeded, advantages, resampled, seconds, prompt_tokens)

    async def update(
        self, policies: Policies, prepared: Sample, step: int, prepare_next: PrepareNext[Sample]
    ) -> dict[str, Any]:
        run, sample = self.run, prepared
        assert run.gateway is not None
        ahead = prepare_next() if self.max_staleness else None
        # Each policy learns from its own calls alone, and every sampled token is in one row.
        rows = await self.rows(policies, sample, step)
        self.updating = True
        due = {name: r for name, r in rows.items() if self.learns(r)}
        metrics: dict[str, Mapping[str, float]] = {}
        if due:
            if self.max_staleness:
                metrics = await self.learn(policies, due, sample)
                if ahead is not None:
                    # All of its calls are of the weights before this update, so that a resumed run, which finds these
                    # rollouts in the store, equals one that was never stopped.
                    await asyncio.wait([ahead])
            # Requests are held, so that no answer is sampled from two versions of the weights.
            async with run.gateway.hold(), self._begun_early(step, prepare_next):
                metrics = metrics or await self.learn(policies, due, sample)
                await asyncio.gather(*(publish(policies[name], r, step) for name, r in due.items()))
        else:
            run.progress.note(f"step {step + 1}: no update: {self.why_flat}")

        await record(run, policies, sample.advantages.calls, rows, step)
        for name in due:
            await run.store.add_policy_version(run.run_id, name, policies[name].version, step + 1)
        return facts(sample, policies, rows, metrics) | {
            "rollouts_per_second": len(sample.results) / max(1e-9, sample.seconds),
            "engine/prompt_tokens_computed": sample.prompt_tokens["computed"],
            "engine/prompt_tokens_reused": sample.prompt_tokens["reused"],
        }

    @contextlib.asynccontextmanager
    async def _begun_early(self, step: int, prepare_next: PrepareNext[Sample]) -> AsyncIterator[None]:
        """Begin the next step's rollouts shortly before the update in this block is expected to end: agents start, and
        their first requests are held until the new weights are served."""
        began, timer = time.monotonic(), None
        if self._update_seconds and not self.max_staleness and not self.is_validated(step):
            # Not sooner: what agents wait for counts against their time limits.
            wait = self._update_seconds - HEAD_START
            timer = asyncio.get_running_loop().call_later(max(0.0, wait), prepare_next)
        self._no_update.clear()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._no_update.set()
        self._served_at = time.monotonic()
        self._update_seconds = self._served_at - began


def candidates(results: Seq[RolloutResult]) -> list[Candidate]:
    """The rollouts of a step that succeeded, to choose from."""
    return [
        Candidate(r.attempt_trajectory, r.rollout.task, r.rollout.created_at)
        for r in results
        if r.attempt_trajectory is not None
    ]


def advantages_of_chosen(results: Seq[RolloutResult], chosen: Chosen, otherwise: str) -> StepAdvantages:
    """What each call is worth where some of them were chosen: its weight.

    Args:
        results: the step's rollouts. chosen: of them. otherwise: why the others are not trained.
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
        dropped_groups=0,
        zero_variance_groups=0,
        flat_groups=frozenset(rollout.group for rollout, _ in attempts) - groups,
    )


def make_rows(sample: Sample, policies: Policies, step: int, max_staleness: int = 0) -> Rows:
    """Merge each policy's calls into training rows.

    Raises:
        NoTrainableDataError: no row of any policy holds a token to train, although no group was left out as flat.
        StalePolicyError: a call was sampled by weights that are more than `max_staleness` updates older than those in
            training, or by later ones.
    """
    advantages = sample.advantages
    trajectories = {name: advantages.of(name) for name in policies.names}
    rows = {name: [row for t in ts for row in merge(t, advantages.advantages)] for name, ts in trajectories.items()}
    flat = any(c.dropped == FLAT and c.policy in rows for c in advantages.calls)
    if not flat and not any(row.n_actions for policy_rows in rows.values() for row in policy_rows):
        if advantages.dropped_groups:
            why = f"{advantages.dropped_groups} group(s) kept no two to compare"
        else:
            why = "none of their answers is whole" if advantages.calls else "they made no call"
        raise NoTrainableDataError(
            f"step {step + 1} has nothing to train on: {len(sample.succeeded)} of {len(sample.results)} rollouts "
            f"succeeded, and {why}",
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
