"""The rewards that spans of other tracers report, by OpenTelemetry's `gen_ai.evaluation.result` events."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from agl import semconv
from agl.mdp.spans import Event, Span, recorded
from agl.mdp.types import Reward
from agl.names import NAME_BYTES, is_too_long


def evaluated(received: Sequence[Span]) -> list[Span]:
    """The spans of the rewards. An event without a number, such as one with a label alone, is none.

    Of a span's evaluations the only one counts towards returns, or the one named "reward"; otherwise none does.
    """
    rewards: list[Span] = []
    for span in received:
        # agl's own rewards have such an event for viewers.
        events = {} if span.operation == semconv.REWARD else _scored(span)
        main = next(iter(events)) if len(events) == 1 else "reward"
        rewards += [_reward_span(span, name, event, primary=name == main) for name, event in events.items()]
    return rewards


def _scored(span: Span) -> dict[str, Event]:
    """Name -> the last event of a span that has a number for it. Other programs' names that are too long are cut."""
    return {
        _name(event): event
        for event in span.events
        if event.name == semconv.EVALUATION and _is_number(event.attributes.get(semconv.EVALUATION_SCORE))
    }


def _name(event: Event) -> str:
    name = str(event.attributes.get(semconv.EVALUATION_NAME) or "reward")
    if not is_too_long(name):
        return name
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{name[: NAME_BYTES // 8]}... {digest}"


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def _reward_span(span: Span, name: str, event: Event, *, primary: bool) -> Span:
    explanation = event.attributes.get(semconv.EVALUATION_EXPLANATION)
    reward = Reward(
        name,
        float(event.attributes[semconv.EVALUATION_SCORE]),
        "emit",
        primary=primary,
        explanation=None if explanation is None else str(explanation),
    )
    # A span that is received twice gives the same reward.
    identity = hashlib.blake2b(f"{span.span_id}/{name}".encode(errors="surrogatepass"), digest_size=8).hexdigest()
    facts = {**reward.attributes, semconv.REWARD_CALL: event.attributes.get(semconv.RESPONSE_ID)}
    where = {"parent_id": span.span_id, "span_id": identity, "start": event.time, "end": event.time}
    return recorded(span, semconv.REWARD, name, span.agent or "", facts, **where)
