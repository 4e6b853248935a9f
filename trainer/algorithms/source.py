"""What the steps of a run learn from: tasks that its policies sample, or recorded rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from agl.mdp.sequence import TrainingRow
from agl.mdp.types import Trajectory
from agl.trainer.algorithms.settings import TrainingSettings
from agl.trainer.objectives.advantages import CallAdvantage, StepAdvantages
from agl.trainer.run.batches import Batches
from agl.trainer.run.results import require_tasks
from agl.trainer.run.run import Run
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.traces import Chosen

Rows = Mapping[str, list[TrainingRow]]
"""A step's training rows by policy."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a run learns from, in batches: tasks that its policies sample, or recorded rollouts.

    Attributes:
        batches: of tasks; or of recorded rollouts, each as its trajectories.
        steps: of the run.
        group_size: rollouts per task.
        max_staleness: by how many updates the weights that sampled may be older;
            None where they are those of other runs.
        chosen: the recorded rollouts; None where the policies sample.
        pairs: of recorded rollouts, the better one's id -> the worse one's.
    """

    batches: Batches
    steps: int
    group_size: int = 1
    max_staleness: int | None = 0
    chosen: Chosen | None = None
    pairs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_tasks(
        cls,
        run: Run,
        settings: TrainingSettings,
        batch_size: int | None,
        group_size: int,
        *,
        steps: int | None = None,
        max_staleness: int = 0,
        by_spread: bool = False,
    ) -> Source:
        """The run's training tasks.

        Args:
            batch_size: tasks per step; None = all of them.
            steps: of the run; None = what the settings say.
            by_spread: draw tasks by `Batches.spreads`.

        Raises:
            DatasetError: there is none.
        """
        require_tasks(run.train, "the training dataset")
        n = len(run.train)
        steps = steps or settings.steps
        size = batch_size or n
        if size > n:
            has = "has some twice" if steps else "has each of them once"
            run.progress.note(f"batch_size={size} is more than the {n} tasks: a step {has}")
            size = size if steps else n
        batches = Batches(run.train, size, run.seed, None if steps else settings.epochs, {} if by_spread else None)
        return cls(batches, steps or batches.steps(), group_size, max_staleness)

    @classmethod
    def of_recorded(
        cls,
        run: Run,
        settings: TrainingSettings,
        batch_size: int,
        chosen: Chosen,
        pairs: Mapping[str, str] | None = None,
    ) -> Source:
        """Recorded rollouts, those of a pair in one batch."""
        if len(run.train):
            run.progress.note("the training tasks are not sampled: this learns from recorded rollouts")
        pairs = pairs or {}
        better = {worse: better for better, worse in pairs.items()}
        units: dict[str, list[Trajectory]] = {}
        for trajectory in chosen.trajectories:
            units.setdefault(better.get(trajectory.rollout_id, trajectory.rollout_id), []).append(trajectory)
        batches = Batches(list(units.values()), min(batch_size, len(units)), run.seed, settings.epochs)
        return cls(batches, settings.steps or batches.steps(), max_staleness=None, chosen=chosen, pairs=pairs)

    @property
    def sampled(self) -> bool:
        """Whether each step has rollouts."""
        return self.chosen is None

    def worth(self, trajectories: Seq[Trajectory]) -> StepAdvantages:
        """What each call of these recorded trajectories is worth: its weight."""
        assert self.chosen is not None
        weights = self.chosen.weights
        calls = tuple(
            CallAdvantage(
                t.call.id, t.call.rollout_id, of.policy, t.reward, of.total_reward, weights[t.call.id], dropped=None
            )
            for of in trajectories
            for t in of.transitions
        )
        return StepAdvantages(
            tuple(trajectories), weights, calls, frozenset(), frozenset(), frozenset(), pairs=self.pairs
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """What one step learns from.

    Attributes:
        results: its rollouts, failed ones included.
        recorded: trajectories of recorded ones, where nothing is sampled.
        resampled: how many tasks were sampled in place of groups that had nothing to learn from.
        seconds: that sampling took.
        prompt_tokens: of its calls, "computed" and "reused" (`Policies.prompt_tokens`).
    """

    results: Seq[RolloutResult] = ()
    recorded: Seq[Trajectory] = ()
    resampled: int = 0
    seconds: float = 0.0
    prompt_tokens: Mapping[str, int] = field(default_factory=Counter)
