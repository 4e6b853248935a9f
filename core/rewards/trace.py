"""What an attempt has done so far, as a reward function sees it: who spoke, which tools ran, what it cost."""

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
    What runs outside of training (`agl.rewards.untrained`, an LLM judge) is among `spans`, but in none of the views.

    Attributes:
        rollout_id, attempt: which. agent: the outermost one.
        spans: of the attempt; its root span is still open while rewards are computed, so it is not among them.
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
        """Names of those who asked a model, in order of first call."""
        return tuple(dict.fromkeys(s.agent for s in self.calls if s.agent is not None))

    @property
    def turns(self) -> Mapping[str, int]:
        """Agent -> how often it had the floor: runs of it (`invoke_agent` spans) in which it asked a model."""
        by_id = {s.span_id: s for s in self.spans}
        seen: dict[str, set[str | None]] = {}
        for call in self.calls:
            if call.agent is None:
                continue
            run = call.parent_id
            while (span := by_id.get(run or "")) is not None and span.operation != semconv.INVOKE_AGENT:
                run = span.parent_id
            seen.setdefault(call.agent, set()).add(run)
        return {agent: len(runs) for agent, runs in seen.items()}

    def of(self, agents: AgentFilter) -> Trace:
        """The same with the spans of some agents only: name, glob, pattern, callable or several; None = all."""
        if agents is None:
            return self
        selection = select(agents)
        kept = tuple(s for s in self.spans if s.agent is not None and selection.policy_for(s.agent) is not None)
        return replace(self, spans=kept)

    def _of(self, operation: str) -> tuple[Span, ...]:
        found = (s for s in self.spans if s.operation == operation and not s.attributes.get(semconv.UNTRAINED))
        return tuple(sorted(found, key=lambda s: s.start))


def said(call: Span) -> str | None:
    """The text that a `chat` span's model answered; None where content was not captured."""
    given = call.attributes.get(semconv.OUTPUT_MESSAGES)
    if given is None:
        return None
    return "\n".join(text for message in json.loads(given) if (text := message_text(message)))


def message_text(message: Any) -> str:
    """The text in a message: its content, or the text blocks of it, thoughts and tool calls left out."""
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
