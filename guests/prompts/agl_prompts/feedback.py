"""A rollout as text for the model that rewrites prompts: each agent's messages, tools and rewards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from agl import semconv
from agl.mdp.outcomes import tool_outcomes
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Reward
from agl.messages import Message, read
from agl.trainer.run.results import reward_label
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import Store

MAX_CHARACTERS = 2000
"""Of one text; of a longer one, beginning and end are shown."""


async def describe(store: Store, result: RolloutResult, score: float, hidden: Iterable[str] = ()) -> dict[str, str]:
    """What happened in the last attempt of a rollout, by heading.

    Args:
        score: of the rollout.
        hidden: texts of messages that are not repeated, the prompts themselves.
    """
    rollout_id = result.rollout.rollout_id
    attempt = result.attempt
    spans = await store.query_spans(rollout_id, attempt)
    index = SpanIndex(await store.query_calls(rollout_id, attempt), spans)
    chats = [s for s in spans if s.operation == semconv.CHAT and not s.attributes.get(semconv.UNTRAINED)]
    numbers = _numbers(chats)
    task = result.rollout.task
    record = {"Task": _cut(task if isinstance(task, str) else json.dumps(task, ensure_ascii=False, default=str))}
    for agent in dict.fromkeys(s.agent or "agent" for s in chats):
        own = [s for s in chats if (s.agent or "agent") == agent]
        record[f"Agent {agent}"] = "\n".join(_conversation(own, set(hidden)))
    if tools := [
        f"{o.agent} called {o.tool}({_cut(json.dumps(o.arguments, ensure_ascii=False, default=str))}): "
        + (f"FAILED: {_cut(o.error)}" if o.error is not None else _cut(o.output or "no result"))
        for o in tool_outcomes(index)
    ]:
        record["Tools"] = "\n".join(tools)
    if index.root is not None and (output := index.root.attributes.get("agl.output")) is not None:
        record["Output"] = _cut(str(output))
    lines = [f"score {score:g}"]
    for span in spans:
        if (reward := Reward.of_span(span.attributes, span.parent_id)) is not None:
            counts = "" if reward.primary else " (not part of the score)"
            lines.append(
                f"{reward_label(reward)} = {reward.value:g}{counts}, earned by {_earner(span, index, numbers)}"
            )
    if result.error is not None:
        attempts = await store.query_attempts(rollout_id)
        lines.append(f"the rollout failed: {_cut(attempts[-1].error or str(result.error), tail=True)}")
    record["Feedback"] = "\n".join(lines)
    return record


def _numbers(chats: Sequence[Span]) -> dict[str, str]:
    """Span id of a call -> how it is called in texts."""
    counts: dict[str, int] = {}
    numbers = {}
    for span in chats:
        agent = span.agent or "agent"
        counts[agent] = counts.get(agent, 0) + 1
        numbers[span.span_id] = f"call {counts[agent]} of {agent}"
    return numbers


def _conversation(chats: Sequence[Span], hidden: set[str]) -> list[str]:
    lines: list[str] = []
    before: list[Message] = []
    for number, span in enumerate(chats, 1):
        messages = read.sent(span)
        new = messages[len(before) :] if before and messages[: len(before)] == before else messages
        lines.append(f"call {number}")
        for message in new:
            # What the agent itself said is shown with its call, what tools returned with the tools.
            if message.text and message.text not in hidden and message.role not in ("assistant", "tool"):
                lines.append(f"{message.role}: {_cut(message.text)}")
        for message in read.said(span):
            called = ", ".join(f"{c.name}({c.json_arguments})" for c in message.tool_calls)
            text = f"{message.text}\n[calls {called}]".strip() if called else message.text
            lines.append(f"assistant: {_cut(text)}")
        if span.status == "error":
            lines.append(f"the call failed: {_cut(span.status_message or 'unknown')}")
        before = messages
    return lines


def _earner(span: Span, index: SpanIndex, numbers: Mapping[str, str]) -> str:
    """Which call a reward's span was emitted for."""
    call_id = span.attributes.get(semconv.REWARD_CALL)
    call = next((c for c in index.calls if c.id == call_id), None) or index.rewarded_call(span.parent_id)
    if call is not None and (number := numbers.get(call.span_id or "")) is not None:
        return number
    for outer in index.upwards(span.parent_id):
        if outer.span_id in numbers:
            return numbers[outer.span_id]
        if outer.operation == semconv.EXECUTE_TOOL:
            tool = f"tool {outer.attributes.get(semconv.TOOL_NAME)}"
            tool_call_id = str(outer.attributes.get(semconv.TOOL_CALL_ID) or "")
            # Where no gateway recorded the call, its answer holds the tool call's id.
            for span_id, number in numbers.items() if tool_call_id else ():
                if any(c.id == tool_call_id for m in read.said(index.spans[span_id]) for c in m.tool_calls):
                    return f"{number}, by its {tool}"
            return tool
        if outer.operation == semconv.INVOKE_AGENT and outer.parent_id is not None:
            # As for returns: the last call of an agent that is not the outermost.
            within = [number for span_id, number in numbers.items() if index.within(span_id, outer.span_id)]
            return within[-1] if within else f"agent {outer.agent}"
    return "the whole rollout"


def _cut(text: str, *, tail: bool = False) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    if tail:
        return f"… {text[-MAX_CHARACTERS:]}"
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"
