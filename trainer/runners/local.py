"""Runs rollouts in this process: async agents as tasks on a loop of their own, sync agents in threads of their own.

Invariant: an attempt always ends, in time, with its calls, spans and rewards in the store or with the reason it failed.
The agents' loop is not the gateway's, so an agent that blocks its loop cannot block the model it is waiting for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import traceback
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agl import semconv, tracing
from agl.agents import Agent, Outcome, RolloutInfo
from agl.errors import AglError, CaptureError, RewardError, RolloutError, RolloutTimeoutError
from agl.hooks import Hook
from agl.intermediate import AIR, as_spans
from agl.mdp import Call
from agl.resources import LLM, Task
from agl.rewards.emit import as_rewards, record
from agl.selection import Selection
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.store.base import AttemptedRollout, Rollout, Store
from agl.trajectories import Built, build, check

log = logging.getLogger("agl.runner")

OUTPUT = "agl.output"
HEARTBEAT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class RolloutResult:
    """What a rollout came to, after its last attempt.

    Attributes:
        rollout: as stored. attempt: the last one, from 1.
        built: trajectories and rewards of that attempt; None when it failed.
        error: why it failed; None when it succeeded.
    """

    rollout: Rollout
    attempt: int
    built: Built | None
    error: BaseException | None


class LocalRunner:
    """N workers that lease rollouts of one run from the store and run them here. Lives on the caller's event loop.

    Args:
        agent: what to run. store, gateway: where facts go; without a gateway nothing is routed.
        selection: which agents are trained.
        run_id: the run whose rollouts are leased; None = any.
        n_workers: how many rollouts run at once.
        rules: mode -> what the trainer decides about sampling.
        resources: what rollouts are given beside the LLM.
        model: the name that agents see for the policy.
        done: called with each result, on the caller's loop.
        air: the rules that reward tool outcomes, calls and handoffs, if any.
        broken: called when a worker itself fails (the store is gone, say), which no rollout can be blamed for.
        hooks: called around every attempt.
        rewarded: whether an attempt without a reward has failed.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        store: Store,
        gateway: Gateway | None,
        selection: Selection,
        run_id: str | None,
        n_workers: int,
        rules: Callable[[str], SamplingRules],
        resources: Mapping[str, Any],
        model: str,
        done: Callable[[RolloutResult], None],
        broken: Callable[[BaseException], None],
        capture_content: bool = True,
        air: AIR | None = None,
        hooks: Sequence[Hook] = (),
        rewarded: bool = True,
    ) -> None:
        self.hooks, self.rewarded = tuple(hooks), rewarded
        self.agent, self.store, self.gateway, self.selection = agent, store, gateway, selection
        self.run_id, self.n_workers, self.rules, self.resources = run_id, n_workers, rules, resources
        self.model, self.done, self.broken, self.capture_content = model, done, broken, capture_content
        self.air = air
        self._wake = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._agents = _AgentLoop()
        self._running: dict[tuple[str, int], None] = {}

    async def start(self) -> None:
        """Start the workers."""
        self._agents.start()
        for i in range(self.n_workers):
            self._workers.append(asyncio.ensure_future(self._work(f"local-{i}")))
        self._workers.append(asyncio.ensure_future(self._beat()))
        for worker in self._workers:
            worker.add_done_callback(self._ended)

    def _ended(self, worker: asyncio.Task[None]) -> None:
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self.broken(error)

    def wake(self) -> None:
        """Tell idle workers that rollouts were enqueued."""
        self._wake.set()

    async def stop(self) -> None:
        """Cancel what runs and end the workers; bounded."""
        for task in self._workers:
            task.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers.clear()
        await asyncio.to_thread(self._agents.stop)

    async def _work(self, worker_id: str) -> None:
        while True:
            leased = await self.store.dequeue_rollout(worker_id, run_id=self.run_id)
            if leased is None:
                self._wake.clear()
                # Other processes may enqueue as well, so an idle worker looks again by itself.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), 1.0)
                continue
            await self.attempt(leased)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for rollout_id, attempt in list(self._running):
                try:
                    await self.store.heartbeat(rollout_id, attempt)
                except AglError as error:
                    log.debug("heartbeat: %s", error)

    async def attempt(self, leased: AttemptedRollout) -> None:
        """Run one leased rollout; `done` gets its result, unless it is queued for another try."""
        key = (leased.rollout.rollout_id, leased.attempt.attempt)
        self._running[key] = None
        try:
            await self._attempt(leased)
        finally:
            self._running.pop(key, None)

    async def _attempt(self, leased: AttemptedRollout) -> None:
        rollout, attempt = leased.rollout, leased.attempt.attempt
        context = tracing.RolloutContext(
            rollout.rollout_id, attempt, self.agent.name, self.selection, capture_content=self.capture_content,
            # With a gateway, what is trained is recorded there; what the others ask grows with every turn.
            prompts=self.gateway is None,
        )  # fmt: skip
        llm: dict[str, LLM] = {}
        if self.gateway is not None:
            rules = self.rules(rollout.mode)
            access, context.key = self.gateway.open_attempt(
                rollout.rollout_id, attempt, selection=self.selection, seed=rollout.seed, rules=rules
            )
            context.gateway_url = self.gateway.base_url
            name = urllib.parse.quote(self.agent.name, safe="")
            sampling = {} if rules.temperature is None else {"temperature": rules.temperature}
            llm["llm"] = LLM(f"{access.url}/agents/{name}/v1", self.model, context.key, sampling)
        calls: list[Call] = []
        error: BaseException | None = None
        status = "succeeded"
        await self.store.update_attempt(rollout.rollout_id, attempt, "running")
        try:
            info = RolloutInfo(rollout.rollout_id, attempt, rollout.mode, rollout.step)
            await self._hook("on_rollout_start", leased)
            await self._run(context, Task.of(rollout.task), {**llm, **self.resources}, info, leased)
        except TimeoutError:
            status = "timeout"
            error = RolloutTimeoutError(
                f"agent {self.agent.name!r} ran past its limit of {rollout.config.timeout_seconds:g} s",
                hint="raise Trainer(timeout=...), or find out what it waits for; a sync agent's thread cannot be "
                "stopped and goes on in the background",
                rollout=rollout.rollout_id,
                attempt=attempt,
            )
        except asyncio.CancelledError:
            tracing.close(context)
            if self.gateway is not None:
                await self.gateway.close_attempt(rollout.rollout_id, attempt)
            raise
        except Exception as raised:
            status, error = "failed", _located(raised, rollout.rollout_id, attempt, self.agent.name)
        finally:
            tracing.close(context)
        if self.gateway is not None:
            calls = await self.gateway.close_attempt(rollout.rollout_id, attempt)
        await self.store.add_spans(context.spans)
        try:
            await self._hook("on_rollout_end", leased, spans=tuple(context.spans))
        except Exception as raised:
            if error is None:
                status, error = "failed", _located(raised, rollout.rollout_id, attempt, self.agent.name)
            else:
                log.warning("rollout %s attempt %d: %s", rollout.rollout_id, attempt, raised)
        built = None
        if error is None:
            try:
                built = await self._built(rollout, attempt, calls, context)
            except AglError as refused:
                status, error = "failed", refused
        text = None if error is None else "".join(traceback.format_exception(error)).strip()
        after = await self.store.update_attempt(rollout.rollout_id, attempt, status, error=text)  # type: ignore[arg-type]
        if after.status == "queuing":
            log.info("rollout %s attempt %d %s, trying again: %s", rollout.rollout_id, attempt, status, error)
            self.wake()
            return
        self.done(RolloutResult(after, attempt, built, error))

    async def _built(self, rollout: Rollout, attempt: int, calls: list[Call], context: tracing.RolloutContext) -> Built:
        what = (rollout.rollout_id, attempt, rollout.group, calls)
        built = build(*what, context.spans, self.selection)
        if self.gateway is not None:
            check(built, self.selection, rollout_id=rollout.rollout_id, attempt=attempt)
        if self.air is not None and (credited := self.air.rewards(calls, context.spans, self.selection)):
            earned = as_spans(credited, context.spans)
            await self.store.add_spans(earned)
            built = build(*what, [*context.spans, *earned], self.selection)
            if built.unplaced and self.gateway is not None:
                log.warning(
                    "rollout %s: no call known for %d AIR reward(s) (%s); they count for the whole rollout",
                    rollout.rollout_id, len(built.unplaced), ", ".join(sorted({r.name for r in built.unplaced})),
                )  # fmt: skip
        if self.rewarded and built.reward is None:
            raise RewardError(
                f"agent {self.agent.name!r} returned no reward and emitted none",
                hint="return a number, pass reward= to agl.wrap, or call agl.emit_reward",
                rollout=rollout.rollout_id,
                attempt=attempt,
            )
        return built

    async def _run(
        self,
        context: tracing.RolloutContext,
        task: Any,
        resources: dict[str, Any],
        info: RolloutInfo,
        leased: AttemptedRollout,
    ) -> None:
        agent = self.agent
        where = {"rollout": info.rollout_id, "attempt": info.attempt, "agent": agent.name}

        def note(scope: tracing.Scope, outcome: Outcome) -> None:
            if outcome.reward is not None:
                agents = {s.agent for s in list(context.spans) if s.operation == semconv.CHAT and s.agent is not None}
                for reward in as_rewards(outcome.reward, agents=agents, **where):
                    record(reward)
            if context.capture_content and outcome.output is not None:
                scope.span.set_attribute(OUTPUT, _as_text(outcome.output))

        def failed(scope: tracing.Scope, error: Exception) -> None:
            # The agent's own failure can be an outcome; the machinery's never is.
            if agent.error_reward is None or isinstance(error, AglError) or _is_infrastructure(error):
                raise error
            scope.span.record_exception(error)
            note(scope, Outcome(agent.error_reward, f"{type(error).__name__}: {error}"))

        if agent.is_async:

            async def run_async() -> None:
                with tracing.running(context) as scope:
                    try:
                        await self._each_hook("on_trace_start", leased, tracer=context)
                        result: Any = agent.run(task, resources, info)
                        outcome = await result
                        await self._each_hook("on_trace_end", leased, tracer=context)
                        note(scope, outcome)
                    except Exception as error:
                        failed(scope, error)

            future = self._agents.submit(run_async())
        else:

            def run_sync() -> None:
                with tracing.running(context) as scope:
                    try:
                        # In this thread, so that the hook is inside the attempt too.
                        if self.hooks:
                            asyncio.run(self._each_hook("on_trace_start", leased, tracer=context))
                        outcome: Any = agent.run(task, resources, info)
                        if self.hooks:
                            asyncio.run(self._each_hook("on_trace_end", leased, tracer=context))
                        note(scope, outcome)
                    except Exception as error:
                        failed(scope, error)

            future = _in_thread(run_sync, f"agl-rollout-{info.rollout_id}")
        await asyncio.wait_for(future, leased.rollout.config.timeout_seconds)

    async def _hook(self, name: str, leased: AttemptedRollout, **facts: Any) -> None:
        """Call every hook from outside the attempt, on the agents' loop: one that blocks cannot block the gateway."""
        if self.hooks:
            call = self._agents.submit(self._each_hook(name, leased, **facts))
            await asyncio.wait_for(call, leased.rollout.config.timeout_seconds)

    async def _each_hook(self, name: str, leased: AttemptedRollout, **facts: Any) -> None:
        for hook in self.hooks:
            try:
                await getattr(hook, name)(agent=self.agent, runner=self, rollout=leased, **facts)
            except Exception as error:
                raise RolloutError(
                    f"the hook {hook.name}.{name} raised {type(error).__name__}: {error}",
                    hint="what it was to do has not been done; catch in it what may fail",
                    rollout=leased.rollout.rollout_id,
                    attempt=leased.attempt.attempt,
                    agent=self.agent.name,
                ) from error


class _AgentLoop:
    """The event loop, in a thread of its own, that async agents run on."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agl-agents", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> Awaitable[None]:
        assert self._loop is not None
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def stop(self) -> None:
        """End the loop; tasks that do not let themselves be cancelled within a second are left behind."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return

        async def cancel_all() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            if tasks:
                _, deaf = await asyncio.wait(tasks, timeout=1.0)
                for task in deaf:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
            await loop.shutdown_asyncgens()

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(2.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(2.0)
        if not thread.is_alive():
            loop.close()
        self._loop = self._thread = None


def _in_thread(function: Callable[[], None], name: str) -> asyncio.Future[None]:
    """Run in a daemon thread: one that hangs cannot be stopped, but must not keep the process alive either."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def body() -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


def _located(error: Exception, rollout_id: str, attempt: int, agent: str) -> BaseException:
    if isinstance(error, CaptureError | RewardError) or (isinstance(error, AglError) and "rollout" in error.where):
        return error
    located = RolloutError(
        f"agent {agent!r} raised {type(error).__name__}: {error}",
        hint="it is tried again, then dropped from its group; agl.wrap(..., error_reward=x) would score it instead",
        rollout=rollout_id,
        attempt=attempt,
    )
    located.__cause__ = error
    return located


def _is_infrastructure(error: BaseException) -> bool:
    """Whether the connection to a model failed, rather than the agent: that must never become a reward."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"APIConnectionError", "InternalServerError", "AuthenticationError", "RateLimitError"}:
        return True
    return isinstance(error, ConnectionError | OSError)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError:
        return repr(value)
