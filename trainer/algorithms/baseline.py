"""Run an agent on its own model and report its rewards; nothing is routed and nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass

from agl.trainer.gateway.access import SamplingRules
from agl.trainer.run import Run, mean_rewards, require_some


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Measures an agent as it is.

    Attributes:
        repeats: rollouts per task.
    """

    repeats: int = 1

    async def run(self, run: Run) -> None:
        await self._measure(run, len(run.train), self.repeats)

    async def dev(self, run: Run, n_tasks: int) -> None:
        await self._measure(run, n_tasks, 1)

    async def _measure(self, run: Run, n_tasks: int, repeats: int) -> None:
        run.progress.start(1)
        await run.start(lambda mode: SamplingRules(), "", routed=False)
        try:
            tasks = list(enumerate(run.train))[:n_tasks]
            results = await run.rollouts(tasks, mode="dev", step=0, group_size=repeats)
            good = require_some(results, "the run")
            failed = len(results) - len(good)
            run.history.append({"step": 0, **mean_rewards(good, "train"), "train/failed_rollouts": failed})
        finally:
            await run.stop()
            run.progress.stop()
