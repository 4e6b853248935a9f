"""Executes leases in this process: async agents as tasks on a separate loop, sync agents each in a separate thread.

The agents' loop is not the gateway's, so an agent that blocks its loop cannot block the model it is waiting for.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import orjson

from agl import semconv, tracing
from agl.agents.agent import Agent, Outcome, RolloutInfo
from agl.agents.causes import answer_error_cause, causes_of
from agl.agents.hooks import Hook
from agl.agents.prompts import replacements
from agl.agents.resources import LLM, SystemPrompt, Task
from agl.errors import (
    AglError,
    AsException,
    CaptureError,
    ConfigError,
    RewardError,
    RolloutError,
    RolloutTimeoutError,
    UserCodeError,
    described,
)
from agl.mdp.evidence import unreadable_inputs
from agl.mdp.spans import Span
from agl.rewards.emit import as_rewards, only_last, record
from agl.rewards.function import raised_by
from agl.surroundings import start_thread
from agl.tracing import main_thread
from agl.trainer.http.aio import LoopThread
from agl.trainer.runners.blame import is_infrastructure, of_service, place_of_own, raised_at
from agl.trainer.runners.command import CommandAgent, CommandFailed
from agl.trainer.runners.protocol import Coordinator, Lease, Report

if TYPE_CHECKING:
    # A worker without commands needs no server.
    from agl.trainer.runners.command_recorder import CommandRecorder

log = logging.getLogger("agl.runner")

_idle: list[LoopThread] = []
"""Loops of ended runs. A program's async client belongs to the loop of its first request: the next run of the same
program, such as `fit` after `dev`, finds it there."""

MEMORY_SECONDS = 60.0
"""How long a search in a memory may take."""


class Executor:
    """Runs one agent, any number of attempts at once. Lives on the caller's event loop.

    Args:
        agent: what to run.
        coordinator: gets the reports.
        hooks: called around every attempt.
        runner: passed to the hooks.
        on_span_end: called with every span as it ends, in the thread that ended it.
    """

    def __init__(
        self,
        agent: Agent,
        coordinator: Coordinator,
        *,
        hooks: Sequence[Hook] = (),
        runner: Any = None,
        on_span_end: Callable[[Span], None] | None = None,
    ) -> None:
        self.agent, self.coordinator, self.hooks, self.runner = agent, coordinator, tuple(hooks), runner
        self.on_span_end = on_span_end
        self._agents: LoopThread | None = None
        self._recorder: CommandRecorder | None = None
        self._listening: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Start the agents' loop, or take one that an earlier run has left."""
        while _idle and self._agents is None:
            loop = _idle.pop()
            self._agents = loop if loop.alive else None  # dead in a process that was forked
        self._agents = self._agents or LoopThread("agl-agents")

    async def stop(self) -> None:
        """End what runs in the agents' loop; bounded."""
        loop = self._agents
        self._agents = None
        if loop is not None:
            if await asyncio.to_thread(loop.settle):
                _idle.append(loop)
            else:
                await asyncio.to_thread(loop.stop)
        if self._recorder is not None:
            await self._recorder.stop()
            self._recorder = None

    async def attempt(self, lease: Lease) -> Report:
        """Execute a lease and send its report to the coordinator.

        Raises:
            AglError: the coordinator could not be reached, or refuses the report.
        """
        report = await self.execute(lease)
        if self.hooks:
            await self.coordinator.deliver(lease, report.spans)
            try:
                await self._hook("on_rollout_end", lease, spans=tuple(report.spans))
            except Exception as raised:
                if report.error is None:
                    report = Report(report.spans, self._with_place(raised, lease))
                else:
                    log.warning("rollout %s attempt %d: %s", *lease.id, raised)
        await self.coordinator.finish(lease, report)
        return report

    async def execute(self, lease: Lease) -> Report:
        """Run the agent on a lease's task. The report has the error that the agent raised.

        Raises:
            CancelledError: the awaiting task was cancelled.
        """
        rollout = lease.rollout
        attempt = lease.attempt
        context = tracing.RolloutContext(
            rollout.rollout_id,
            attempt,
            self.agent.name,
            lease.selection,
            capture_content=lease.capture_content,
            # The gateway records the prompts of trained agents; the prompts of the others grow with every turn.
            prompts=lease.gateway is None,
            on_span_end=self.on_span_end,
        )
        context.system_prompts = replacements(lease.resources)
        resources = {name: r for name, r in lease.resources.items() if not isinstance(r, SystemPrompt)}
        if lease.gateway is not None:
            context.gateway_url = lease.gateway
            context.key = lease.key or ""
            name = urllib.parse.quote(self.agent.name, safe="")
            llm = LLM(f"{lease.url}/agents/{name}/v1", lease.model, lease.key, lease.sampling)
            resources = {"llm": llm, **resources}
        error: BaseException | None = None
        try:
            if self.agent.memory is not None:
                context.memory = self._memory(lease)
            info = RolloutInfo(rollout.rollout_id, attempt, rollout.mode, rollout.step)
            await self._hook("on_rollout_start", lease)
            routed = lease.gateway is not None and lease.selection.policy_for(self.agent.name) is not None
            if isinstance(self.agent, CommandAgent) and (self.agent.sub_agents or not routed):
                await self._record_commands(context)
            await self._run(context, Task.of(rollout.task), resources, info, lease)
        except TimeoutError:
            error = RolloutTimeoutError(
                f"agent {self.agent.name!r} ran past its limit of {rollout.config.timeout_seconds:g} s",
                hint="raise Trainer(timeout=...), or find out what it waits for; a sync agent's thread cannot be "
                'stopped and continues in the background: runners="process" kills it',
                rollout=rollout.rollout_id,
                attempt=attempt,
            )
        except Exception as raised:
            error = self._with_place(raised, lease, context.spans)
        finally:
            tracing.close(context)
            if self._recorder is not None:
                await self._recorder.close(context)
        return Report(only_last(context.spans), error)

    def _memory(self, lease: Lease) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
        """Searches the agent's memory for the attempt, from its thread or from the agents' loop.

        Raises:
            ConfigError: the run does not know of the memory.
        """
        where = {"rollout": lease.rollout.rollout_id, "attempt": lease.attempt, "agent": self.agent.name}
        if "memory" not in lease.rollout.metadata:
            raise ConfigError(
                f"agent {self.agent.name!r} has a memory, of which its run does not know",
                hint="give the run the agent itself: fit(agent, ...), not the name of its module, and with "
                'runners="remote" too; a store without a run has no memory',
                **where,
            )
        loop = asyncio.get_running_loop()

        def search(request: Mapping[str, Any]) -> Mapping[str, Any]:
            reply = asyncio.run_coroutine_threadsafe(self.coordinator.remember(lease, request), loop)
            found = reply.result(MEMORY_SECONDS)
            if found is None or "error" in found:
                why = "the attempt is over" if found is None else found["error"]
                raise RolloutError(f"the memory cannot be read: {why}", **where)
            return found

        return search

    async def _record_commands(self, context: tracing.RolloutContext) -> None:
        """Have calls recorded that commands of this attempt send to their own providers."""
        if self._recorder is None:
            from agl.trainer.runners.command_recorder import CommandRecorder

            self._recorder = CommandRecorder()
            self._listening = asyncio.ensure_future(self._recorder.start())
        assert self._listening is not None
        await asyncio.shield(self._listening)
        context.recorder = functools.partial(self._recorder.variables, context)

    async def _run(
        self, context: tracing.RolloutContext, task: Any, resources: dict[str, Any], info: RolloutInfo, lease: Lease
    ) -> None:
        agent = self.agent
        where = {"rollout": info.rollout_id, "attempt": info.attempt, "agent": agent.name}

        def record_outcome(scope: tracing.Scope, outcome: Outcome) -> None:
            main_thread.require_none_refused(f"agent {agent.name!r}")
            if outcome.reward is not None:
                agents = {s.agent for s in list(context.spans) if s.operation == semconv.CHAT and s.agent is not None}
                for reward in as_rewards(outcome.reward, agents=agents, **where):
                    record(reward)
            if outcome.grading_seconds is not None:
                scope.span.set_attribute(semconv.GRADING_SECONDS, outcome.grading_seconds)
            if context.capture_content and outcome.output is not None:
                scope.span.set_attribute(semconv.OUTPUT, _as_text(outcome.output))

        def record_failure(scope: tracing.Scope, error: Exception) -> None:
            # The agent's own failure can have a reward; a failure of the infrastructure never has one.
            if not isinstance(error, AglError):
                main_thread.require_none_refused(f"agent {agent.name!r}", error)
            if isinstance(error, TimeoutError):
                # Not the attempt's own limit, which `execute` would take it for.
                raise self._with_place(error, lease, context.spans) from error
            if of_service(error):
                scope.span.set_attribute(semconv.AGENT_ERROR_OF_SERVICE, True)
            if (reward := raised_by(error)) is not None:
                scope.span.set_attribute(semconv.REWARD_ERROR, reward)
            if isinstance(error, AglError) and (place := place_of_own(error)) is not None:
                scope.span.set_attribute(semconv.AGENT_ERROR_PLACE, place)
            if isinstance(error, AglError) or is_infrastructure(error):
                raise error
            scope.span.set_attribute(semconv.AGENT_ERROR, described(error, content=context.capture_content))
            cause = (error.cause if isinstance(error, CommandFailed) else None) or answer_error_cause(error)
            if cause is not None:
                scope.span.set_attribute(semconv.AGENT_ERROR_CAUSE, cause)
            if context.capture_content and (inputs := unreadable_inputs(causes_of(error))):
                scope.span.set_attribute(semconv.AGENT_ERROR_INPUTS, inputs)
            scope.span.set_attribute(semconv.AGENT_ERROR_PLACE, raised_at(error) or "")
            # It would hide a fault of the reward function.
            if agent.error_reward is None or reward is not None:
                raise error
            scope.span.record_exception(error)
            record_outcome(scope, Outcome(agent.error_reward, described(error)))

        if agent.is_async:

            async def run_async() -> None:
                with tracing.running(context) as scope:
                    try:
                        await self._each_hook("on_trace_start", lease, tracer=context)
                        with AsException():
                            result: Any = agent.run(task, resources, info)
                            outcome = await result
                        await self._each_hook("on_trace_end", lease, tracer=context)
                        record_outcome(scope, outcome)
                    except Exception as error:
                        record_failure(scope, error)

            assert self._agents is not None
            future = asyncio.wrap_future(self._agents.submit(run_async()))
        else:

            def run_sync() -> None:
                with tracing.running(context) as scope:
                    try:
                        # In this thread, so that the hook runs in the attempt's context.
                        if self.hooks:
                            asyncio.run(self._each_hook("on_trace_start", lease, tracer=context))
                        with AsException():
                            outcome: Any = agent.run(task, resources, info)
                        if self.hooks:
                            asyncio.run(self._each_hook("on_trace_end", lease, tracer=context))
                        record_outcome(scope, outcome)
                    except Exception as error:
                        record_failure(scope, error)

            future = _in_thread(run_sync, f"agl-rollout-{info.rollout_id}")
        await asyncio.wait_for(future, lease.rollout.config.timeout_seconds)

    async def _hook(self, name: str, lease: Lease, **facts: Any) -> None:
        """Call every hook outside the attempt's context, on the agents' loop: a hook cannot block the gateway."""
        if self.hooks:
            assert self._agents is not None
            call = self._agents.submit(self._each_hook(name, lease, **facts))
            await asyncio.wait_for(asyncio.wrap_future(call), lease.rollout.config.timeout_seconds)

    async def _each_hook(self, name: str, lease: Lease, **facts: Any) -> None:
        facts |= {"agent": self.agent, "runner": self.runner, "rollout": lease.attempted_rollout}
        for hook in self.hooks:
            try:
                await getattr(hook, name)(**facts)
            except Exception as error:
                kind = RolloutError if of_service(error) else UserCodeError
                raise kind(
                    f"the hook {hook.name}.{name} raised {described(error)}",
                    hint="the hook did not finish its work; catch in it what may fail",
                    rollout=lease.rollout.rollout_id,
                    attempt=lease.attempt,
                    agent=self.agent.name,
                ) from error

    def _with_place(self, error: Exception, lease: Lease, spans: Sequence[Span] = ()) -> BaseException:
        if isinstance(error, CaptureError | RewardError) or (isinstance(error, AglError) and "rollout" in error.where):
            return error
        what = f"agent {self.agent.name!r} raised {described(error)}"
        hint = (
            "it is tried again unless it fails the same way each time; a rollout that fails is excluded from its group"
        )
        if (reward := raised_by(error)) is not None:
            what = f"{reward} of {what}"
            hint = f"correct it, or return a low reward for an output that it cannot read; {hint}"
        elif not is_infrastructure(error):
            hint += (
                ". Where an answer of the policy is why, let the agent raise agl.PolicyFault; "
                "agl.wrap(..., error_reward=x) gives every such run a reward instead"
            )
        elif (call := _failed_call(error, spans)) is not None:
            url = call.attributes.get(semconv.URL, "its model")
            what = f"agent {call.agent!r}, which is not trained, got no answer from {url}: {call.status_message}"
            hint = f"check that this URL can be reached from here, and its key; {hint}"
        rollout_error = RolloutError(what, hint=hint, rollout=lease.rollout.rollout_id, attempt=lease.attempt)
        rollout_error.__cause__ = error
        return rollout_error


def _in_thread(function: Callable[[], None], name: str) -> Awaitable[None]:
    """Run in a daemon thread, which does not keep the process alive when it hangs."""
    future: Future[None] = Future()
    # From now on a caller that is cancelled leaves it alone: the thread resolves it.
    future.set_running_or_notify_cancel()

    def body() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    start_thread(body, name)
    return asyncio.wrap_future(future)


def _failed_call(error: BaseException, spans: Sequence[Span]) -> Span | None:
    """The `chat` span, not routed to the gateway, whose request raised this exception."""
    raised = {described(e, content=content) for e in causes_of(error) for content in (True, False)}
    chats = (s for s in reversed(spans) if s.operation == semconv.CHAT and not s.attributes.get(semconv.ROUTED))
    return next((s for s in chats if s.status_message in raised), None)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError:
        return repr(value)
