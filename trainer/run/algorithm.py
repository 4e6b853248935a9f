"""What an algorithm is to the trainer."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from agl.trainer.run.run import Run


@runtime_checkable
class Algorithm(Protocol):
    """Runs a training run to its end, or until its task is cancelled; cleans up after itself either way."""

    async def run(self, run: Run) -> None:
        """Fill `run.history`, `run.checkpoint` and `run.policy_paths`.

        Raises:
            AglError: what went wrong, where, and what to do.
        """
        ...

    async def dev(self, run: Run, n_tasks: int) -> None:
        """A dry run: `n_tasks` rollouts, no update; prints what training would have seen."""
        ...
