"""The trace of an attempt so far, for reward functions: LLM calls, tools, agents and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl import semconv, tracing
from agl.mdp.order import in_order
from agl.mdp.selection import AgentFilter, select
from agl.mdp.spans import Span
from agl.mdp.tool_runs import joined
from agl.mdp.types import Call
from agl.messages import Message, read, write
from agl.tracing.inferred import completed, with_messages


@dataclass(frozen=True, slots=True)
class Trace:
    """The finished spans of one attempt, in the order in which they ended.

    A reward function gets one by naming or annotating an argument: `def score(task, output, trace: agl.rewards.Trace)`.
    Spans of untrained blocks (`agl.rewards.untrained`, an LLM judge) are in `spans`, but in no other property.

    Attributes:
        rollout_id, attempt: identify the attempt.
        agent: the outermost agent.
        spans: of the attempt; while it runs without its root span, which is still open then.
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
        return Trace(rollout.rollout_id, rollout.attempt, rollout.agent, tuple(joined(list(rollout.spans))))

    @classmethod
    def of_attempt(cls, rollout_id: str, attempt: int, spans: Sequence[Span], calls: Sequence[Call]) -> Trace:
        """The trace of an attempt that has ended, as it was stored; its calls have their whole conversations."""
        spans = with_messages(completed(spans, calls), calls)
        root = next((s for s in spans if s.parent_id is None), None)
        return cls(rollout_id, attempt, (root.agent if root else None) or "agent", tuple(spans))

    @property
    def output(self) -> str | None:
        """The text of what the agent gave; None while it runs, and where content was not captured."""
        root = next((s for s in self.spans if s.parent_id is None), None)
        output = root.attributes.get(semconv.OUTPUT) if root else None
        return None if output is None else str(output)

    @property
    def conversation(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """(agent, message) of every message to and from the agents, each once, in order of first appearance.

        Messages are in the form of Chat Completions.

        A tool's result that no agent was sent is a message of role "tool", too. Of an agent that keeps its own model
        while another is trained, what it was sent is not recorded: there are its answers and tools alone.
        """
        sent = {call.span_id: read.sent(call) for call in self.calls}
        known = {r.id for messages in sent.values() for message in messages for r in message.tool_results}
        ids = {tool.span_id: tool.attributes.get(semconv.TOOL_CALL_ID) for tool in self.tools}
        # Where results are sent, those of tools without an id are among them.
        unsent = [s for s in self.tools if ids[s.span_id] not in known and (ids[s.span_id] or not known)]
        said: list[tuple[str, Mapping[str, Any]]] = []
        earlier: dict[str, list[list[Message]]] = {}
        for span in in_order([*self.calls, *unsent]):
            agent = span.agent or self.agent
            if span.operation == semconv.EXECUTE_TOOL:
                facts = span.attributes
                text = facts.get(semconv.TOOL_CALL_RESULT, span.status_message)
                call = f"{facts.get(semconv.TOOL_NAME)}({facts.get(semconv.TOOL_CALL_ARGUMENTS, '')})"
                said.append((agent, {"role": "tool", "name": call, "content": text}))
                continue
            prompt = sent[span.span_id]
            starts = [len(p) for p in earlier.setdefault(agent, []) if prompt[: len(p)] == p]
            new = prompt[max(starts, default=0) :]
            while starts and new and new[0].role == "assistant":
                new = new[1:]
            earlier[agent].append(prompt)
            said += [(agent, m) for m in write.to_openai([*new, *read.said(span)], text_only=False)]
        return tuple(said)

    @property
    def calls(self) -> tuple[Span, ...]:
        """LLM calls (`chat` spans), trained or not, in order of start."""
        return self._of(semconv.CHAT)

    @property
    def tools(self) -> tuple[Span, ...]:
        """Tool executions (`execute_tool` spans), in order of start; without those that wait for a person."""
        return tuple(s for s in self._of(semconv.EXECUTE_TOOL) if s.is_tool_run)

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
        selection = select(agents).knowing(s.agent for s in self.spans)
        spans = tuple(s for s in self.spans if s.agent is not None and selection.policy_for(s.agent) is not None)
        return replace(self, spans=spans)

    def _of(self, operation: str) -> tuple[Span, ...]:
        return tuple(
            s for s in in_order(self.spans) if s.operation == operation and not s.attributes.get(semconv.UNTRAINED)
        )


def response_text(call: Span) -> str | None:
    """The response text of a `chat` span; None where content was not captured."""
    if call.attributes.get(semconv.OUTPUT_MESSAGES) is None:
        return None
    return "\n".join(message.text for message in read.said(call) if message.text)


def message_line(agent: str, message: Mapping[str, Any]) -> str:
    """A message of an agent's conversation for a reader, with its tool calls."""
    role = message.get("role", "?")
    rest = {k: v for k, v in message.items() if k != "role" and v}
    content = rest.pop("content", None)
    parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content else []
    parts += [json.dumps(rest, ensure_ascii=False)] if rest else []
    return f"{agent} | {role}: {' '.join(parts)}"
