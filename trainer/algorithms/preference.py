"""Direct preference optimisation: of two rollouts of one task, the better one becomes likelier than the worse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from agl.errors import ConfigError
from agl.mdp.builder import AttemptTrajectory
from agl.trainer.algorithms.groups import grouped_options
from agl.trainer.algorithms.imitation import copy_rollouts
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.source import Rows, Sample, Source
from agl.trainer.algorithms.training import Training
from agl.trainer.algorithms.worth import candidates, worth_of_chosen
from agl.trainer.local.tokenizer import load_renderings
from agl.trainer.objectives.advantages import StepAdvantages
from agl.trainer.run.config import require_positive
from agl.trainer.run.run import Run
from agl.trainer.traces import Candidate, Chosen, Pairs, Traces, pairs


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(LocalTraining):
    """Direct preference optimisation on pairs of rollouts of one task, whose rewards say which is the better one.

    A rollout counts whole: the log-probs of all its trained tokens, over all its calls, are summed. Both sides of a
    pair are compared with the model that training began with, which is kept next to the policy (with LoRA it is the
    model without the adapter).

    Source: arXiv 2305.18290, eq. 7.

    Attributes:
        data: the rollouts to pair, `agl.traces(...)`: its `where` says which may be the better one, its `per_task` how
            many pairs a task has at most. None samples them: `group_size` rollouts per task, `batch_size` tasks a step.
        beta: how strongly the policy is held to the reference.
        margin: smallest difference of the rewards of a pair.
        by: the reward that is compared, such as
            `agl.reward("correct")`; None = all of it.
        batch_size: pairs per step of recorded data.
    """

    needs_tasks: ClassVar[bool] = False
    why_flat: ClassVar[str] = "no two rollouts of a task make a pair"

    data: Traces | None = None
    beta: float = 0.1
    margin: float = 0.0
    by: Callable[[AttemptTrajectory], float | None] | None = None
    group_size: int = 4
    batch_size: int = 16

    def __post_init__(self) -> None:
        require_positive(batch_size=self.batch_size, group_size=self.group_size)
        if self.data is not None and self.data.weight is not None:
            raise ConfigError("DPO takes no weights", hint="leave out weight= of agl.traces, or use agl.SFT")
        if self.data is None and self.group_size < 2:
            raise ConfigError("group_size is 1, so no rollout has another to be paired with", hint="use at least 2")
        if self.loss_agg != "token-mean":
            raise ConfigError(
                f"loss_agg={self.loss_agg!r} with DPO", hint="leave it out: the loss is a mean over pairs"
            )
        pairs([], margin=self.margin, by=self.by)
        LocalTraining.__post_init__(self)

    def _loss_settings(self) -> dict[str, Any]:
        return {"policy_loss": "dpo", "beta": self.beta}

    async def source(self, run: Run) -> Source:
        if self.data is None:
            return Source.of_tasks(run, self, self.batch_size, self.group_size)
        found = await self._recorded(self.data, run)
        counts = found.require().counts
        run.progress.note(
            f"{counts['pairs']} pairs of {counts['rollouts_paired']} of {counts['rollouts']} rollouts are compared"
        )
        sides = _sides(found)
        await copy_rollouts(self.data, sides.trajectories, run, self.metadata(run))
        return Source.of_recorded(run, self, self.batch_size, sides, _worse(found))

    async def worth(self, training: Training, sample: Sample, step: int) -> StepAdvantages:
        """Of every call of a better rollout 1, of a worse one -1."""
        if not training.source.sampled:
            return training.source.worth(sample.recorded)
        found = pairs(candidates(sample.results), margin=self.margin, by=self.by)
        return worth_of_chosen(sample.results, _sides(found), "it is in no pair", _worse(found))

    async def rows(self, training: Training, worth: StepAdvantages, step: int) -> Rows:
        if not worth.trajectories:
            return {name: [] for name in training.policies.names}
        return await LocalTraining.rows(self, training, worth, step)

    async def _recorded(self, data: Traces, run: Run) -> Pairs:
        """The pairs of recorded rollouts, with the tokens of the run's policies."""
        renderings = await asyncio.to_thread(load_renderings, self.models(run), self.renderer)
        recorded: list[Candidate] = []
        async for record in data.records():
            if (attempt := data.recorded(record, run.config.selection)) is not None:
                recorded.append(await asyncio.to_thread(attempt.with_tokens, renderings))
        return pairs(recorded, where=data.where, per_task=data.per_task, margin=self.margin, by=self.by)


def _sides(found: Pairs) -> Chosen:
    """Both sides of all pairs; a call's weight is 1 on the better side and -1 on the worse."""
    trajectories = tuple(side for pair in found.pairs for side in (pair.chosen, pair.rejected))
    weights = {
        t.call.id: sign
        for pair in found.pairs
        for side, sign in ((pair.chosen, 1.0), (pair.rejected, -1.0))
        for t in side.transitions
    }
    return Chosen(trajectories, weights, found.counts, {})


def _worse(found: Pairs) -> dict[str, str]:
    # A pair of two rollouts may be one for each of several policies.
    return {pair.chosen.rollout_id: pair.rejected.rollout_id for pair in found.pairs}
