"""The protocol that the trainer expects of an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from agl.trainer.run.run import Run
from agl.trainer.runners.protocol import RolloutResult


@runtime_checkable
class Algorithm(Protocol):
    """Runs a training run to its end, or until its task is cancelled; cleans up after itself either way."""

    async def run(self, run: Run) -> None:
        """Fill `run.history`, `run.checkpoint` and `run.policy_paths`.

        Raises:
            AglError: what went wrong, where, and what to do.
        """
        ...

    async def dev(self, run: Run, n_tasks: int) -> Sequence[RolloutResult] | None:
        """A dry run: `n_tasks` rollouts, no update.

        Returns:
            The rollouts, failed ones included, which the trainer reports and counts in `run.history`; None if the
            algorithm has filled `run.history` itself.
        """
        ...
