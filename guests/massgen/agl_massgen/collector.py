"""Collects traces: runs of agents become spans of agl, in a trainer's rollout or in a separate one.

Invariant: what an agent sees of context variables is the same as without a collector, whichever task takes the next
part of its answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from agl import semconv, tracing
from agl.agents.frameworks import ImportedFrameworks
from agl.errors import ConfigError
from agl.mdp.order import next_number
from agl.mdp.selection import select
from agl.messages import write
from agl.rewards.trace import Trace as Attempt
from agl.tracing import context
from agl.tracing.threads import carried_across_threads
from agl.trainer.store.types import new_rollout_id
from agl_massgen.config import RLConfig
from agl_massgen.files import (
    AGENT,
    STAGE,
    STATUS,
    TASK,
    PromptSpan,
    RewardSpan,
    ToolSpan,
    TraceSpan,
    TraceStatus,
    trace_id,
)
from agl_massgen.store import Begun, LightningStore

log = logging.getLogger("agl.massgen")

PRESENTING = ("presentation", "post_evaluation")
"""Stages after the vote: what an agent says there is no move of the coordination."""


class CollectedRollout(tracing.RolloutContext):
    """A rollout that a collector began, not a trainer."""


class TraceCollector:
    """Starts, fills and ends traces.

    Outside of a rollout, the outermost run is a separate rollout in the store; the LLM calls in it are recorded by
    agl's adapters, which this switches on. Inside one, runs are spans of it, and its trainer's store keeps them.

    Args:
        store: for runs outside of rollouts; `config.store_config` if None.
        config: what is recorded.
    """

    def __init__(self, store: LightningStore | None = None, config: RLConfig | None = None) -> None:
        self.config = config or RLConfig(enable_rl=True)
        self.store = store or LightningStore(self.config.store_config)
        self._tracing: contextlib.ExitStack | None = None

    def start_trace(self, agent_id: str, task: str = "", *, stage: str | None = None) -> AgentRun:
        """Begin a run of an agent. It is current within `AgentRun.step` alone.

        Args:
            task: what it was sent.
            stage: of the coordination. A presentation is no action of the agent: where the
                agent is trained it is not credited, and goes to the agent's own model.
        """
        parent = tracing.current()
        presents = stage in PRESENTING
        own = parent is None
        # Under its own name a presentation would be credited with what the agent did before.
        name = f"{stage} of {agent_id}" if presents else agent_id
        facts = {AGENT: agent_id if presents else None, STAGE: stage, TASK: None}
        with _aside():
            if own:
                self._switch_on()
                rollout = CollectedRollout(new_rollout_id(), 1, agent_id, select(), prompts=True)
                rollout.on_span_end = self.store.put
                self.store.begin(rollout.rollout_id, Begun(task, agent_id, time.monotonic()))
                scope = tracing.start(semconv.INVOKE_AGENT, name, agent=name, rollout=rollout, attributes=facts)
            else:
                assert parent is not None
                facts[TASK] = task if parent.rollout.capture_content else None
                chosen = presents and parent.rollout.selection.policy_for(name) is not None
                scope = tracing.start(
                    semconv.INVOKE_AGENT, name, agent=name, parent=parent, attributes=facts, untrained=chosen
                )
            assert scope is not None
            return AgentRun(self, agent_id, scope, own=own)

    def end_trace(
        self, run: AgentRun, status: TraceStatus = "completed", error: BaseException | str | None = None
    ) -> None:
        """End a run, from any context."""
        run.end(status, error)

    def add_feedback(self, trace_id: str, reward: float, reason: str = "") -> None:
        """Add a person's reward to a trace that has ended. It counts.

        Raises:
            ConfigError: `enable_human_feedback` is off.
            StoreError: the store has no such trace.
        """
        if not self.config.enable_human_feedback:
            raise ConfigError("human feedback is off", hint="RLConfig(enable_human_feedback=True)")
        self.store.add_reward(trace_id, RewardSpan(reward, "human", reason))

    def flush(self) -> bool:
        """Wait until what was collected is stored, and its files are written; False if that takes too long."""
        return self.store.flush()

    def close(self) -> None:
        """Store the rest, and stop recording LLM calls."""
        self.store.close()
        if self._tracing is not None:
            self._tracing.close()
            self._tracing = None

    def _switch_on(self) -> None:
        if self._tracing is None:
            self._tracing = contextlib.ExitStack()
            self._tracing.enter_context(carried_across_threads())
            frameworks = ImportedFrameworks()
            frameworks.instrument()
            self._tracing.callback(frameworks.uninstrument)
            weakref.finalize(self, self._tracing.close).atexit = False


class AgentRun:
    """One run of an agent, while it is active.

    Attributes:
        trace_id: of its trace.
        scope: its span.
        own: whether it is the outermost run of a separate rollout.
    """

    def __init__(self, collector: TraceCollector, agent_id: str, scope: tracing.Scope, *, own: bool) -> None:
        self.collector = collector
        self.agent_id = agent_id
        self.scope = scope
        self.own = own
        self.trace_id = trace_id(scope.rollout.rollout_id, None if scope.parent is None else scope.span_id)
        self._inside: tracing.Scope | None = scope
        self._first = next_number()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Make the run current for one step of its generator, whichever task takes the step.

        Set and reset within the step: an orchestrator takes each chunk in a task of its own, whose context ends with
        it, and a variable that is set in one and reset in another raises. What the generator itself made current is
        current again at its next step.
        """
        with _aside():
            context.restore(self._inside)
            try:
                yield
            finally:
                self._inside = context.snapshot()

    @property
    def attempt(self) -> Attempt:
        """What the rollout recorded so far."""
        rollout = self.scope.rollout
        return Attempt(rollout.rollout_id, rollout.attempt, rollout.agent, tuple(rollout.spans))

    def emit(self, span: TraceSpan, *, call_id: str | None = None, reward: RewardSpan | None = None) -> None:
        """Record something that happened in the run.

        Args:
            call_id: of a tool call, the model's id for it.
            reward: of a tool call; the LLM call that asked earns it.
        """
        content = self.scope.rollout.capture_content
        match span:
            case PromptSpan():
                facts = {
                    semconv.REQUEST_MODEL: span.model,
                    semconv.INPUT_MESSAGES: write.history_json(span.input) if content else None,
                    semconv.OUTPUT_MESSAGES: write.answer_json(span.output) if content else None,
                }
                self._record(semconv.CHAT, span.model, facts, span.error)
            case ToolSpan():
                facts = {
                    semconv.TOOL_NAME: span.tool_name,
                    semconv.TOOL_CALL_ID: call_id,
                    semconv.TOOL_CALL_ARGUMENTS: _text(span.arguments) if content else None,
                    semconv.TOOL_CALL_RESULT: _text(span.result) if content and span.result is not None else None,
                }
                self._record(semconv.EXECUTE_TOOL, span.tool_name, facts, span.error, reward)
            case RewardSpan():
                self._record(semconv.REWARD, span.reward_type, self._reward(span))
            case _ if content:
                value = {k: v for k, v in span.to_json().items() if k != "timestamp"}
                self._record(semconv.OBJECT, span.span_type, {semconv.VALUE: _text(value)})

    def end(self, status: TraceStatus = "completed", error: BaseException | str | None = None) -> None:
        """End the run; a second call does nothing."""
        facts = {STATUS: status} if status == "cancelled" else {}
        with _aside():
            tracing.end(self.scope, error=error, attributes=facts)
            if self.own:
                tracing.close(self.scope.rollout)

    @property
    def asked_a_model(self) -> bool:
        """Whether an LLM call was recorded in the run."""
        mine = [s for s in list(self.scope.rollout.spans) if s.agent == self.scope.agent]
        return any(s.operation == semconv.CHAT and (s.sequence or 0) >= self._first for s in mine)

    def _reward(self, span: RewardSpan) -> dict[str, Any]:
        return {
            semconv.REWARD_NAME: span.reward_type,
            semconv.REWARD_VALUE: span.reward,
            # In a separate rollout it counts: it is what the trace earned.
            semconv.REWARD_PRIMARY: self.collected or not self.collector.config.collect_only,
            semconv.REWARD_SOURCE: "emit",
            semconv.VALUE: span.reason,
            semconv.REWARD_AGENT: span.agent_id,
        }

    @property
    def collected(self) -> bool:
        """Whether nothing but a collector watches: in a trainer's rollout faults are raised, and rewards may count."""
        return isinstance(self.scope.rollout, CollectedRollout)

    def _record(
        self,
        kind: str,
        name: str,
        facts: Mapping[str, Any],
        error: str | None = None,
        reward: RewardSpan | None = None,
    ) -> None:
        with _aside():
            scope = tracing.start(kind, name, parent=self.scope, attributes=facts)
            if scope is None:
                return
            if reward is not None:
                inner = tracing.start(semconv.REWARD, reward.reward_type, attributes=self._reward(reward))
                if inner is not None:
                    tracing.end(inner)
            tracing.end(scope, error=error)


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Leave what is current in this context as it is, whatever the block makes current."""
    scope = context.snapshot()
    try:
        yield
    finally:
        context.restore(scope)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
