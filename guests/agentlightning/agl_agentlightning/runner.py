"""0.3's `LitAgentRunner`: runs one agent on a store's rollouts, without a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Generic, TypeVar

from agl.agents import hooks as agl_hooks
from agl.agents.agent import as_agent
from agl.errors import ConfigError, RolloutError
from agl.mdp.order import in_order
from agl.mdp.selection import select
from agl.options import reject_unknown
from agl_agentlightning import types as T
from agl_agentlightning.lightning_store import LightningStore
from agl_agentlightning.litagent import LitAgent
from agl_agentlightning.tracer import AgentOpsTracer
from agl_agentlightning.utils import system_snapshot

__all__ = ["LitAgentRunner", "Runner"]

V = TypeVar("V")
log = logging.getLogger("agl.runner")

_WITHOUT_EFFECT = ("interval_jitter", "heartbeat_launch_mode", "heartbeat_include_gpu")


class LitAgentRunner(Generic[V]):
    """Runs rollouts in this process. The agent's calls go to its own models: nothing is routed or trained.

    Args:
        tracer: switched on while the runner is initialised; every imported framework's if None.
        max_rollouts: how many rollouts `iter` runs; None = until its event is set.
        poll_interval: seconds between looks for a rollout.
        heartbeat_interval: of `update_worker`.
        **options: 0.3's others, which have no effect.
    """

    def __init__(
        self,
        tracer: Any = None,
        max_rollouts: int | None = None,
        poll_interval: float = 0.2,
        heartbeat_interval: float = 10.0,
        **options: Any,
    ) -> None:
        reject_unknown(options, _WITHOUT_EFFECT, "LitAgentRunner")
        self.tracer = tracer or AgentOpsTracer()
        self.max_rollouts = max_rollouts
        self.poll_interval = poll_interval
        self.heartbeat_interval = heartbeat_interval
        self.worker_id: int | None = None
        self._agent: Any = None
        self._store: LightningStore | None = None
        self._hooks: list[Any] = []

    def init(self, agent: Any, *, hooks: Sequence[Any] | None = None, **_: Any) -> None:
        """Take the agent and switch tracing on."""
        self._agent, self._hooks = agent, list(hooks or ())
        self.tracer.init()
        if isinstance(agent, LitAgent):
            agent.set_runner(self)

    def init_worker(self, worker_id: int, store: LightningStore, **_: Any) -> None:
        """Take the store."""
        self.worker_id = worker_id
        self._store = store
        self.tracer.init_worker(worker_id, store)
        if isinstance(self._agent, LitAgent):
            self._agent._store = store

    def teardown_worker(self, worker_id: int, *_: Any, **__: Any) -> None:
        """Let the store go."""
        self.tracer.teardown_worker(worker_id)
        if isinstance(self._agent, LitAgent):
            self._agent._store = None
        self.worker_id = self._store = None

    def teardown(self, *_: Any, **__: Any) -> None:
        """Switch tracing off."""
        self.tracer.teardown()
        self._agent = None

    @contextlib.contextmanager
    def run_context(
        self, *, agent: Any, store: LightningStore, hooks: Sequence[Any] | None = None, worker_id: int | None = None
    ) -> Iterator[LitAgentRunner[V]]:
        """Initialised inside the block. What the end of it raises is logged."""
        number = worker_id or 0
        self.init(agent, hooks=hooks)
        with _logged("Error during runner teardown", self.teardown):
            self.init_worker(number, store)
            with _logged("Error during runner worker teardown", lambda: self.teardown_worker(number)):
                yield self

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
        """Run one task and return its rollout. What the agent raises is raised here."""
        store = self.get_store()
        named = await store.add_resources(resources) if resources is not None else None
        started = await store.start_rollout(
            input, mode, named.resources_id if named else None, worker_id=self.get_worker_id()
        )
        async with self._running() as (run_one, results):
            await run_one(started)
        error = results[0].error
        if error is not None:
            raise error.__cause__ if isinstance(error, RolloutError) and error.__cause__ is not None else error
        finished = await store.get_rollout_by_id(started.rollout_id)
        assert finished is not None
        return finished

    async def iter(self, *, event: Any = None) -> None:
        """Run the store's queued rollouts, one after another, until `event` is set or `max_rollouts` have been run."""
        store = self.get_store()
        count = 0
        async with self._running() as (run_one, _):
            while not (event is not None and event.is_set()) and count != self.max_rollouts:
                leased = await store.dequeue_rollout(self.get_worker_id())
                if leased is None:
                    await asyncio.sleep(self.poll_interval)
                else:
                    await run_one(leased)
                    count += 1

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[tuple[Any, list[Any]]]:
        from agl.trainer.runners.coordinator import RunCoordinator
        from agl.trainer.runners.local import LocalRunner
        from agl.trainer.store.types import AttemptedRollout

        results: list[Any] = []
        errors: list[BaseException] = []
        store = self.get_store()
        coordinator = RunCoordinator(
            store.agl_store, selection=select(None), resources={}, on_result=results.append, rewarded=False
        )
        runner = LocalRunner(
            as_agent(self._agent),
            coordinator,
            n_workers=0,
            on_failure=errors.append,
            hooks=[HookAdapter(h, self._agent, self) for h in self._hooks],
        )

        async def run_one(rollout: T.AttemptedRollout) -> None:
            stored = await store.agl_store.get_rollout(rollout.rollout_id)
            attempts = await store.agl_store.query_attempts(rollout.rollout_id)
            leased = AttemptedRollout(stored, attempts[rollout.attempt.sequence_id - 1])
            await runner.attempt(await coordinator.open(leased, self.get_worker_id()))
            ended = await store.get_latest_attempt(rollout.rollout_id)
            if ended is not None and ended.worker_id:
                await store.set_worker(ended)

        async def beat() -> None:
            while True:
                await store.update_worker(self.get_worker_id(), system_snapshot())
                await asyncio.sleep(self.heartbeat_interval)

        await runner.start()
        beating = asyncio.ensure_future(beat())
        try:
            yield run_one, results
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await runner.stop()


Runner = LitAgentRunner


@contextlib.contextmanager
def _logged(what: str, end: Any) -> Iterator[None]:
    """Calls `end` after the block; logs what that raises."""
    try:
        yield
    finally:
        try:
            end()
        except Exception:
            log.exception(what)


class HookAdapter(agl_hooks.Hook):
    """Calls a hook with 0.3's arguments: the user's agent, the attempted rollout, spans of 0.3's form."""

    def __init__(self, hook: Any, agent: Any, runner: Any) -> None:
        self._hook = hook
        self._agent = agent
        self._runner = runner

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
        ordered = T.numbered(T.without_root(T.with_calls(in_order(spans), ())))
        await self._hook.on_rollout_end(spans=ordered, **self._facts(rollout))

    def _facts(self, rollout: Any) -> dict[str, Any]:
        return {"agent": self._agent, "runner": self._runner, "rollout": T.AttemptedRollout.of_leased(rollout)}
