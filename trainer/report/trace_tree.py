"""A rollout's spans as a tree: agents, model calls, tools, their results and rewards, in order of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.text import Text
from rich.tree import Tree

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.mdp.order import in_order
from agl.mdp.spans import Span
from agl.messages import read
from agl.texts import printable
from agl.tracing.inferred import completed, totals
from agl.trainer.report.terminal import console
from agl.trainer.store.base import Store
from agl.trainer.store.location import read_store
from agl.trainer.store.types import Attempt

SHOWN = 200
"""Maximum length of a message, argument or result; the terminal's width cuts it further."""


def show_trace(rollout_id: str, store: str | Path | None = None, *, attempt: int | None = None) -> list[dict[str, Any]]:
    """Print a rollout's spans as a tree per attempt, and return them as JSON values.

    Args:
        rollout_id: the id, or a unique prefix of it.
        store: URL or path of the store; AGL_STORE, or the store of the newest run below ./agl-*, if None.
        attempt: number of the only attempt to show; all if None.

    Raises:
        StoreError: no such store or rollout.
    """

    async def query(opened: Store) -> tuple[str, list[tuple[Attempt, list[Span]]]]:
        whole_id = (await opened.get_rollout(rollout_id)).rollout_id
        return whole_id, [
            (a, completed(await opened.query_spans(whole_id, a.attempt), await opened.query_calls(whole_id, a.attempt)))
            for a in await opened.query_attempts(whole_id)
            if attempt in (None, a.attempt)
        ]

    whole_id, traces = read_store(store, query)
    out = console()
    for one, spans in traces:
        out.print(tree(heading(whole_id, one, spans), spans))
    if not traces:
        out.print(f"{whole_id} has no attempt" if attempt is None else f"{whole_id} has no attempt {attempt}")
    return [as_json(s) for _, spans in traces for s in spans]


def heading(rollout_id: str, attempt: Attempt, spans: Sequence[Span]) -> Text:
    """An attempt's status and totals in one line, and its error in the next one."""
    numbers = totals(spans)
    text = Text.assemble((rollout_id, "bold"), f" attempt {attempt.attempt}  ")
    text.append(attempt.status, style="green" if attempt.status == "succeeded" else "red")
    counts = [f"{numbers['calls']} calls"]
    if numbers["output_tokens"] is not None:
        counts.append(f"{numbers['input_tokens']} -> {numbers['output_tokens']} tokens")
    counts.append(f"{numbers['tools']} tools")
    text.append(f"  {', '.join(counts)}", style="dim")
    if attempt.error:
        text.append(printable(f"\n{error_line(attempt.error)}"), style="red")
    return text


def error_line(error: str) -> str:
    """The last line of a traceback, without the hints that agl's errors have after it."""
    lines = [x for x in error.strip().splitlines() if x.strip() and not x.lstrip().startswith("->")]
    return lines[-1].strip() if lines else error.strip()


def tree(title: Text, spans: Sequence[Span]) -> Tree:
    """The spans of one attempt under their parents; one whose parent is missing is at the top."""
    ids = {s.span_id for s in spans}
    children: dict[str | None, list[Span]] = {}
    for span in in_order(spans):
        children.setdefault(span.parent_id if span.parent_id in ids else None, []).append(span)
    root = Tree(title)

    def grow(branch: Tree, parent: str | None, agent: str | None) -> None:
        for span in children.get(parent, ()):
            inside = span.agent if span.operation == semconv.INVOKE_AGENT else agent
            grow(branch.add(line(span, agent)), span.span_id, inside)

    grow(root, None, None)
    return root


def line(span: Span, within: str | None = None) -> Text:
    """A span in one line. `within`: the agent of the lines above, which is not repeated."""
    facts = span.attributes
    text = Text(_short(span.name), style="red" if span.status == "error" else "", no_wrap=True, overflow="ellipsis")
    if span.operation in (semconv.CHAT, semconv.EXECUTE_TOOL) and span.agent != within:
        text.append(f"  {_short(str(span.agent))}", style="cyan")
    if span.operation == semconv.CHAT and facts.get(semconv.ROUTED):
        text.append("  policy", style="green")
    duration = f"  {'<' if facts.get(semconv.INFERRED) else ''}{_seconds(span.seconds)}"
    if span.operation in (semconv.CHAT, semconv.EXECUTE_TOOL, semconv.INVOKE_AGENT):
        text.append(duration, style="dim")
    if (sampled := facts.get(semconv.OUTPUT_TOKENS)) is not None:
        text.append(f"  {facts.get(semconv.INPUT_TOKENS)} -> {sampled} tokens", style="dim")
    match span.operation:
        case semconv.CHAT:
            text.append(f"  {_short(_answer(span))}")
        case semconv.EXECUTE_TOOL:
            text.append(f"  {_short(str(facts.get(semconv.TOOL_CALL_ARGUMENTS, '')))}", style="dim")
            if (result := facts.get(semconv.TOOL_CALL_RESULT)) is not None:
                text.append(f" -> {_short(str(result))}")
            if facts.get(semconv.PAUSED):
                text.append("  waits for a person", style="yellow")
        case semconv.REWARD:
            text.append(f"  {facts.get(semconv.REWARD_VALUE)} ({facts.get(semconv.REWARD_SOURCE)})", style="yellow")
        case semconv.MESSAGE | semconv.OBJECT:
            text.append(f"  {_short(str(facts.get(semconv.VALUE, '')))}")
    if span.status == "error" and span.status_message:
        text.append(f"  {_short(span.status_message)}", style="red")
    return text


def _answer(call: Span) -> str:
    """A model's answer: its text and the names of the tools that it calls; as recorded where that is unreadable."""
    try:
        answers = read.said(call)
    except UnreadableMessageError:
        return str(call.attributes[semconv.OUTPUT_MESSAGES])
    return " ".join(part for m in answers for part in (m.text, *(f"[{c.name}]" for c in m.tool_calls)) if part)


def _seconds(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def as_json(span: Span) -> dict[str, Any]:
    """A span as JSON values."""
    facts = {f.name: getattr(span, f.name) for f in fields(Span)}
    events = [{"name": e.name, "time": e.time, "attributes": _plain(e.attributes)} for e in span.events]
    return facts | {"attributes": _plain(span.attributes), "events": events}


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}


def _short(text: str) -> str:
    one = printable(" ".join(text.split()))
    return one if len(one) <= SHOWN else f"{one[: SHOWN - 1]}…"
