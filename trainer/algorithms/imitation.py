"""Supervised fine-tuning on traces: the calls that were chosen are imitated, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agl.mdp.types import Call, Trajectory
from agl.trainer.algorithms.groups import grouped_options
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.source import Source
from agl.trainer.run.config import require_positive
from agl.trainer.run.run import Run
from agl.trainer.traces import Traces
from agl.trainer.traces.copying import copy_rollout


@grouped_options
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

    def __post_init__(self) -> None:
        require_positive(batch_size=self.batch_size)
        LocalTraining.__post_init__(self)

    def _loss_settings(self) -> dict[str, Any]:
        return {"policy_loss": "nll"}

    async def source(self, run: Run) -> Source:
        chosen = await self.data.choose(self.models(run), run.config.selection, renderer=self.renderer)
        run.progress.note(str(chosen.require()))
        await copy_rollouts(self.data, chosen.trajectories, run, self.metadata(run))
        return Source.of_recorded(run, self, self.batch_size, chosen)


async def copy_rollouts(
    data: Traces, trajectories: Iterable[Trajectory], run: Run, metadata: Mapping[str, Any]
) -> None:
    """Put the rollouts that a run learns from into its store, so that what was trained can be looked at there.

    Args:
        data: where they are.
        trajectories: theirs, with the calls that are trained.
        metadata: of the copies.
    """
    calls: dict[str, dict[str, Call]] = {}
    for trajectory in trajectories:
        calls.setdefault(trajectory.rollout_id, {}).update({t.call.id: t.call for t in trajectory.transitions})
    async for source in data.records():
        if (trained := calls.pop(source.rollout.rollout_id, None)) is not None:
            await copy_rollout(source, run.store, run.run_id, trained, metadata)
