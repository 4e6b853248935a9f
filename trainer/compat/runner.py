"""0.3's `LitAgentRunner`: runs one agent on a store's rollouts, without a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from agl.agents import hooks as agl_hooks
from agl.agents.agent import as_agent
from agl.errors import ConfigError, reject_unknown
from agl.mdp.selection import select
from agl.trainer.compat import types as T
from agl.trainer.compat.litagent import LitAgent
from agl.trainer.compat.store import LightningStore
from agl.trainer.compat.tracer import AgentOpsTracer

__all__ = ["LitAgentRunner", "Runner"]

POLL_SECONDS = 0.2
_POLLING = (
    "poll_interval",
    "heartbeat_interval",
    "interval_jitter",
    "heartbeat_launch_mode",
    "heartbeat_include_gpu",
)


class LitAgentRunner:
    """Runs rollouts in this process. The agent's calls go to its own models: nothing is routed or trained.

    Args:
        tracer: switched on while the runner is initialised; every imported framework's if None.
        max_rollouts: how many rollouts `iter` runs; None = until its event is set.
        **polling: 0.3's intervals, which have no effect.
    """

    def __init__(self, tracer: Any = None, max_rollouts: int | None = None, **polling: Any) -> None:
        reject_unknown(polling, _POLLING, "LitAgentRunner")
        self.tracer = tracer or AgentOpsTracer()
        self.max_rollouts = max_rollouts
        self.worker_id: int | None = None
        self._agent: Any = None
        self._store: LightningStore | None = None
        self._hooks: tuple[Any, ...] = ()

    def init(self, agent: Any, *, hooks: Sequence[Any] | None = None, **_: Any) -> None:
        """Take the agent and switch tracing on."""
        self._agent, self._hooks = agent, tuple(hooks or ())
        self.tracer.instrument()
        if isinstance(agent, LitAgent):
            agent.set_runner(self)

    def init_worker(self, worker_id: int, store: LightningStore, **_: Any) -> None:
        """Take the store."""
        self.worker_id, self._store = worker_id, store
        if isinstance(self._agent, LitAgent):
            self._agent._store = store

    def teardown_worker(self, worker_id: int, *_: Any, **__: Any) -> None:
        if isinstance(self._agent, LitAgent):
            self._agent._store = None
        self.worker_id = self._store = None

    def teardown(self, *_: Any, **__: Any) -> None:
        self.tracer.uninstrument()
        self._agent = None

    @contextlib.contextmanager
    def run_context(
        self, *, agent: Any, store: LightningStore, hooks: Sequence[Any] | None = None, worker_id: int | None = None
    ) -> Iterator[LitAgentRunner]:
        """Initialised inside the block."""
        self.init(agent, hooks=hooks)
        try:
            self.init_worker(worker_id or 0, store)
            yield self
        finally:
            self.teardown_worker(worker_id or 0)
            self.teardown()

    def get_agent(self) -> Any:
        return self._agent

    def get_store(self) -> LightningStore:
        if self._store is None:
            raise ConfigError("this runner has no store yet", hint="use runner.run_context(agent=, store=)")
        return self._store

    def get_worker_id(self) -> str:
        return f"worker-{self.worker_id}"

    async def step(
        self,
        input: Any,
        *,
        resources: T.NamedResources | None = None,
        mode: T.RolloutMode | None = None,
        event: Any = None,
    ) -> T.Rollout:
        """Run one task and return its rollout. An error of the agent is raised."""
        store = self.get_store()
        named = await store.add_resources(resources) if resources is not None else None
        own_run = store.bound(f"step-{uuid.uuid4().hex}")
        await own_run.enqueue_rollout(input, mode, named.resources_id if named else None)
        async with self._running() as (run_one, results):
            leased = await own_run.agl_store.dequeue_rollout(self.get_worker_id(), run_id=own_run.run_id)
            assert leased is not None
            await run_one(leased)
        if results[0].error is not None:
            raise results[0].error
        return T.AttemptedRollout.of_leased(type(leased)(results[0].rollout, leased.attempt))

    async def iter(self, *, event: Any = None) -> None:
        """Run the store's queued rollouts, one after another, until `event` is set or `max_rollouts` have been run."""
        store = self.get_store()
        count = 0
        async with self._running() as (run_one, _):
            while not (event is not None and event.is_set()) and count != self.max_rollouts:
                leased = await store.agl_store.dequeue_rollout(self.get_worker_id(), run_id=store.run_id)
                if leased is None:
                    await asyncio.sleep(POLL_SECONDS)
                else:
                    await run_one(leased)
                    count += 1

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[tuple[Any, list[Any]]]:
        from agl.trainer.runners.coordinator import RunCoordinator
        from agl.trainer.runners.local import LocalRunner

        results: list[Any] = []
        errors: list[BaseException] = []
        coordinator = RunCoordinator(
            self.get_store().agl_store, selection=select(None), resources={}, on_result=results.append, rewarded=False
        )
        runner = LocalRunner(
            as_agent(self._agent),
            coordinator,
            n_workers=0,
            on_failure=errors.append,
            hooks=[HookAdapter(h, self._agent, self) for h in self._hooks],
        )

        async def run_one(leased: Any) -> None:
            await runner.attempt(await coordinator.open(leased, self.get_worker_id()))

        await runner.start()
        try:
            yield run_one, results
        finally:
            await runner.stop()


Runner = LitAgentRunner


class HookAdapter(agl_hooks.Hook):
    """Calls a hook with 0.3's arguments: the user's agent, the attempted rollout, spans of 0.3's form."""

    def __init__(self, hook: Any, agent: Any, runner: Any) -> None:
        self._hook, self._agent, self._runner = hook, agent, runner

    @property
    def name(self) -> str:
        return type(self._hook).__name__

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        await self._hook.on_rollout_start(**self._facts(rollout))

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        await self._hook.on_trace_start(tracer=self._runner.tracer, **self._facts(rollout))

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        await self._hook.on_trace_end(tracer=self._runner.tracer, **self._facts(rollout))

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Sequence[Any]) -> None:
        ordered = T.numbered(T.with_calls(sorted(spans, key=lambda s: s.start), ()))
        await self._hook.on_rollout_end(spans=ordered, **self._facts(rollout))

    def _facts(self, rollout: Any) -> dict[str, Any]:
        return {"agent": self._agent, "runner": self._runner, "rollout": T.AttemptedRollout.of_leased(rollout)}
