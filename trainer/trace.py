"""A rollout's spans as a tree: which agent spoke, which tool ran, what came of it, in the order it happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from agl import semconv
from agl.spans import Span
from agl.trainer.explain import find_store
from agl.trainer.store import open_store

SHOWN = 96
"""Longest text of an argument or result in a line."""


def show_trace(rollout_id: str, store: str | Path | None = None, *, attempt: int | None = None) -> list[dict[str, Any]]:
    """Print a rollout's spans as a tree per attempt, and return them as JSON values.

    Args:
        rollout_id: or a unique beginning of it.
        store: URL or path of the store; that of the newest run below ./agl-* if None.
        attempt: one attempt alone; all if None.

    Raises:
        StoreError: no such store or rollout.
    """
    from agl.trainer.trainer import run_in_thread

    async def main() -> tuple[str, list[Span]]:
        opened = await open_store(find_store(store))
        try:
            rollout = await opened.get_rollout(rollout_id)
            return rollout.rollout_id, await opened.query_spans(rollout.rollout_id, attempt)
        finally:
            await opened.close()

    found, spans = run_in_thread(main())
    console = Console(highlight=False)
    for number in sorted({s.attempt for s in spans}):
        console.print(tree(f"{found} attempt {number}", [s for s in spans if s.attempt == number]))
    if not spans:
        console.print(f"{found} has no spans")
    return [as_json(s) for s in spans]


def tree(title: str, spans: Sequence[Span]) -> Tree:
    """The spans of one attempt under their parents; one whose parent is not among them stands at the top."""
    known = {s.span_id for s in spans}
    children: dict[str | None, list[Span]] = {}
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        children.setdefault(span.parent_id if span.parent_id in known else None, []).append(span)
    root = Tree(Text(title, style="bold"))

    def grow(branch: Tree, parent: str | None) -> None:
        for span in children.get(parent, ()):
            grow(branch.add(line(span)), span.span_id)

    grow(root, None)
    return root


def line(span: Span) -> Text:
    """What a span says in one line."""
    facts = span.attributes
    text = Text(span.name, style="red" if span.status == "error" else "")
    match span.operation:
        case semconv.CHAT:
            text.append(f"  {span.agent}", style="cyan")
            if facts.get(semconv.ROUTED):
                text.append("  trained", style="green")
            tokens = facts.get(semconv.INPUT_TOKENS), facts.get(semconv.OUTPUT_TOKENS)
            if tokens[1] is not None:
                text.append(f"  {tokens[0]} -> {tokens[1]} tokens", style="dim")
        case semconv.EXECUTE_TOOL:
            text.append(_short(f"({facts.get(semconv.TOOL_CALL_ARGUMENTS, '')})"), style="dim")
            if (result := facts.get(semconv.TOOL_CALL_RESULT)) is not None:
                text.append(_short(f" -> {result}"))
        case semconv.REWARD:
            text.append(f"  {facts.get(semconv.REWARD_VALUE)} ({facts.get(semconv.REWARD_SOURCE)})", style="yellow")
    text.append(f"  {(span.end - span.start) * 1000:.1f} ms", style="dim")
    if span.status == "error" and span.status_message:
        text.append(_short(f"  {span.status_message}"), style="red")
    return text


def as_json(span: Span) -> dict[str, Any]:
    """A span as JSON values."""
    return {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "rollout_id": span.rollout_id,
        "attempt": span.attempt,
        "name": span.name,
        "start": span.start,
        "end": span.end,
        "status": span.status,
        "status_message": span.status_message,
        "attributes": _plain(span.attributes),
        "events": [{"name": e.name, "time": e.time, "attributes": _plain(e.attributes)} for e in span.events],
    }


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}


def _short(text: str) -> str:
    one = " ".join(text.split()) if "\n" in text else text
    return one if len(one) <= SHOWN else f"{one[: SHOWN - 1]}…"
