"""The trace of an attempt so far, for reward functions: LLM calls, tools, agents and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agl import semconv, tracing
from agl.mdp.selection import AgentFilter, select
from agl.mdp.spans import Span


@dataclass(frozen=True, slots=True)
class Trace:
    """The finished spans of one attempt, in the order in which they ended.

    A reward function gets one by naming or annotating an argument: `def score(task, output, trace: agl.rewards.Trace)`.
    Spans of untrained blocks (`agl.rewards.untrained`, an LLM judge) are in `spans`, but in no other property.

    Attributes:
        rollout_id, attempt: identify the attempt.
        agent: the outermost agent.
        spans: of the attempt, without its root span, which is still open while rewards are computed.
    """

    rollout_id: str
    attempt: int
    agent: str
    spans: tuple[Span, ...]

    @staticmethod
    def now() -> Trace | None:
        """The trace of the rollout that runs here; None outside one."""
        scope = tracing.current()
        if scope is None:
            return None
        rollout = scope.rollout
        return Trace(rollout.rollout_id, rollout.attempt, rollout.agent, tuple(rollout.spans))

    @property
    def calls(self) -> tuple[Span, ...]:
        """LLM calls (`chat` spans), trained or not, in order of start."""
        return self._of(semconv.CHAT)

    @property
    def tools(self) -> tuple[Span, ...]:
        """Tool executions (`execute_tool` spans), in order of start."""
        return self._of(semconv.EXECUTE_TOOL)

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents that asked a model, in order of their first call."""
        return tuple(dict.fromkeys(s.agent for s in self.calls if s.agent is not None))

    @property
    def turns(self) -> Mapping[str, int]:
        """Agent -> its number of turns: runs of it (`invoke_agent` spans) in which it asked a model."""
        by_id = {s.span_id: s for s in self.spans}
        runs: dict[str, set[str | None]] = {}
        for call in self.calls:
            if call.agent is None:
                continue
            run = call.parent_id
            while (span := by_id.get(run or "")) is not None and span.operation != semconv.INVOKE_AGENT:
                run = span.parent_id
            runs.setdefault(call.agent, set()).add(run)
        return {agent: len(ids) for agent, ids in runs.items()}

    def of(self, agents: AgentFilter) -> Trace:
        """The trace of some agents alone: a name, glob, pattern, callable or several; None = all."""
        if agents is None:
            return self
        selection = select(agents)
        spans = tuple(s for s in self.spans if s.agent is not None and selection.policy_for(s.agent) is not None)
        return replace(self, spans=spans)

    def _of(self, operation: str) -> tuple[Span, ...]:
        spans = (s for s in self.spans if s.operation == operation and not s.attributes.get(semconv.UNTRAINED))
        return tuple(sorted(spans, key=lambda s: s.start))


def response_text(call: Span) -> str | None:
    """The response text of a `chat` span; None where content was not captured."""
    messages = call.attributes.get(semconv.OUTPUT_MESSAGES)
    if messages is None:
        return None
    return "\n".join(text for message in json.loads(messages) if (text := message_text(message)))


def message_text(message: Any) -> str:
    """The text in a message: its content or text blocks, without thoughts and tool calls."""
    if isinstance(message, str):
        return message
    if isinstance(message, Mapping):
        if message.get("type") in ("reasoning", "thinking", "function_call", "tool_use"):
            return ""
        text = message.get("text")
        return text if isinstance(text, str) else message_text(message.get("content"))
    if isinstance(message, list | tuple):
        return "\n".join(text for part in message if (text := message_text(part)))
    return ""
