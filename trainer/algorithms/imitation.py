"""Supervised fine-tuning on traces: the calls that were chosen are imitated, token by token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

from agl.errors import ConfigError, checked_options
from agl.mdp.sequence import merge
from agl.mdp.types import Call, Trajectory
from agl.trainer.algorithms.settings import IMITATION_RATE
from agl.trainer.algorithms.trained_calls import Rows, learned, record
from agl.trainer.algorithms.training import LocalTraining, PrepareNext, Steps, publish
from agl.trainer.objectives.advantages import CallAdvantage
from agl.trainer.policies.policies import Policies
from agl.trainer.run.batches import Batches
from agl.trainer.run.config import require_positive
from agl.trainer.run.run import Run
from agl.trainer.traces import Traces
from agl.trainer.traces.choice import Chosen
from agl.trainer.traces.copying import copy_rollout


@checked_options
@dataclass(frozen=True, slots=True, kw_only=True)
class SFT(LocalTraining):
    """Supervised fine-tuning on traces: maximises the likelihood of the chosen calls' tokens, each forwarded once.

    The loss is the mean negative log-likelihood at temperature 1 of the trained tokens, weighed as `data` says.

    Attributes:
        data: the calls to imitate, `agl.traces(...)`. Where the run has several policies, each learns from the calls of
            the agents that are its own.
        batch_size: rollouts per step.
    """

    needs_tasks: ClassVar[bool] = False

    data: Traces
    batch_size: int = 16
    learning_rate: float = IMITATION_RATE

    def __post_init__(self) -> None:
        require_positive(batch_size=self.batch_size)
        if not isinstance(self.data, Traces):
            raise ConfigError(
                f"data= is a {type(self.data).__name__}",
                hint='for example agl.traces("runs/a", where=agl.reward() >= 1)',
            )
        LocalTraining.__post_init__(self)

    def _learner_settings(self) -> dict[str, Any]:
        return {"policy_loss": "nll"}

    async def make_steps(self, run: Run) -> RecordedSteps:
        chosen = await self.data.choose(self.models(run), run.selection, renderer=self.renderer)
        run.progress.note(str(chosen.require()))
        await copy_rollouts(self.data, chosen.trajectories, run, self.metadata(run))
        return RecordedSteps(self, run, chosen)


async def copy_rollouts(
    data: Traces, trajectories: Iterable[Trajectory], run: Run, metadata: Mapping[str, Any]
) -> None:
    """Put the rollouts that a run learns from into its store, so that what was trained can be looked at there.

    Args:
        data: where they are. trajectories: theirs, with the calls that are trained. metadata: of the copies.
    """
    calls: dict[str, dict[str, Call]] = {}
    for trajectory in trajectories:
        calls.setdefault(trajectory.rollout_id, {}).update({t.call.id: t.call for t in trajectory.transitions})
    async for source in data.records():
        if (trained := calls.pop(source.rollout.rollout_id, None)) is not None:
            await copy_rollout(source, run.store, run.run_id, trained, metadata)


class RecordedSteps(Steps[Seq[Trajectory]]):
    """Batches of rollouts; the weights are served where somebody asks them: for a validation, and at the end."""

    samples = False

    def __init__(self, settings: Any, run: Run, chosen: Chosen) -> None:
        if len(run.train):
            run.progress.note("the training tasks are not sampled: this learns from recorded rollouts")
        self.chosen = chosen
        self._unserved: Rows = {}
        units: dict[str, list[Trajectory]] = {}
        for trajectory in chosen.trajectories:
            units.setdefault(self.unit(trajectory), []).append(trajectory)
        self.batches = Batches(list(units.values()), min(settings.batch_size, len(units)), run.seed)
        super().__init__(settings, run, settings.steps or self.batches.steps_per_epoch() * (settings.epochs or 1))

    def unit(self, trajectory: Trajectory) -> str:
        """What a trajectory belongs to, all of which is in one batch: its rollout."""
        return trajectory.rollout_id

    async def prepare(self, policies: Policies, step: int) -> Seq[Trajectory]:
        return [t for i in self.batches.indices(step) for t in self.batches.tasks[i]]

    async def update(
        self,
        policies: Policies,
        prepared: Seq[Trajectory],
        step: int,
        prepare_next: PrepareNext[Seq[Trajectory]],
    ) -> dict[str, Any]:
        run, weights = self.run, self.chosen.weights
        rows = await asyncio.to_thread(_rows, prepared, policies.names, weights)
        self.updating = True
        due = {name: r for name, r in rows.items() if any(row.n_actions for row in r)}
        metrics = await self.learn(policies, due, prepared)
        self._unserved = {**self._unserved, **due}
        if step + 1 == self.total or self.is_validated(step):
            async with run.gateway.hold() if run.gateway is not None else contextlib.nullcontext():
                await asyncio.gather(*(publish(policies[name], r, step) for name, r in self._unserved.items()))
            self._unserved = {}
        calls = [
            CallAdvantage(
                t.call.id,
                t.call.rollout_id,
                trajectory.policy,
                t.reward,
                trajectory.total_reward,
                weights[t.call.id],
                None,
            )
            for trajectory in prepared
            for t in trajectory.transitions
        ]
        await record(run, policies, calls, rows, step)
        for name in due:
            await run.store.add_policy_version(run.run_id, name, policies[name].version, step + 1)
        return learned(prepared, policies, rows, metrics)


def _rows(trajectories: Seq[Trajectory], names: Seq[str], weights: Mapping[str, float]) -> Rows:
    return {name: [row for t in trajectories if t.policy == name for row in merge(t, weights)] for name in names}
