"""One of 0.3's algorithms as an algorithm of `agl.Trainer`. Importing this module brings the training loop with it."""

from __future__ import annotations

import asyncio
from typing import Any

from agl.errors import ConfigError
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.run.run import Algorithm as AglAlgorithm
from agl.trainer.run.run import Run
from agl.trainer.run.workplace import Workplace
from agl_agentlightning.algorithm import Algorithm, FastAlgorithm
from agl_agentlightning.lightning_store import LightningStore
from agl_agentlightning.litagent import LitAgent


class StoreAlgorithm(AglAlgorithm):
    """One of 0.3's algorithms for `agl.Trainer`: the run's workers serve the rollouts that it enqueues. Nothing is
    routed, so agents call the models that their resources name."""

    needs_tasks = False

    def __init__(self, algorithm: Algorithm, trainer: Any, agent: Any) -> None:
        self.algorithm = algorithm
        self.trainer = trainer
        self.agent = agent

    async def run(self, run: Run) -> None:
        store: LightningStore = self.trainer.bind(run.store, run.run_id)
        self.algorithm.set_trainer(self.trainer)
        self.algorithm.set_store(store)
        if isinstance(self.agent, LitAgent):
            self.agent._store = store
        workplace = Workplace(run)
        await workplace.start(lambda mode: SamplingRules(), "", routed=False, rewarded=False)
        try:
            train = run.train or None
            val = run.val or None
            if self.algorithm.is_async():
                await self.algorithm.run(train, val)
            else:
                await asyncio.to_thread(self.algorithm.run, train, val)
        finally:
            await workplace.stop()
            run.progress.stop()

    async def dev(self, run: Run, n_tasks: int) -> None:
        if not isinstance(self.algorithm, FastAlgorithm):
            raise ConfigError(
                f"dev() cannot run {type(self.algorithm).__name__}: it may train", hint="use algorithm=Baseline()"
            )
        run.train = list(run.train)[:n_tasks]
        await self.run(run)
