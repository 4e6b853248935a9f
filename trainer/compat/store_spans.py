"""The spans of `LightningStore`: kept, numbered, and asked for with what the sampled calls said."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from agl import semconv
from agl.mdp import spans as own
from agl.trainer.compat import types as T
from agl.trainer.compat.store_base import OpenedStore, page

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from agl.mdp.types import Call
    from agl.trainer.store.base import Store


class SpanMethods(OpenedStore):
    """0.3's methods for spans."""

    def __init__(self, store: Store | str | None) -> None:
        super().__init__(store)
        self._sequence = itertools.count(1)

    async def add_span(self, span: T.Span) -> T.Span:
        """Keep a span; the first one of an attempt says that it is running."""
        return (await self.add_many_spans([span]))[0]

    async def add_many_spans(self, spans: Sequence[T.Span]) -> Sequence[T.Span]:
        """Keep several."""
        await self.ours.add_spans([span.to_ours() for span in spans])
        for rollout_id, number in {(s.rollout_id, T.attempt_number(s.attempt_id)) for s in spans}:
            attempts = await self.ours.query_attempts(rollout_id)
            if number <= len(attempts) and attempts[number - 1].status in ("preparing", "unresponsive"):
                await self.ours.update_attempt(rollout_id, number, "running")
        return spans

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> T.Span:
        """Keep an SDK span."""
        number = await self.get_next_span_sequence_id(rollout_id, attempt_id) if sequence_id is None else sequence_id
        return await self.add_span(T.Span.from_opentelemetry(readable_span, rollout_id, attempt_id, number))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """A number above every one that was given out."""
        return next(self._sequence)

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One such number each."""
        return [next(self._sequence) for _ in rollout_attempt_ids]

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: Literal["asc", "desc"] = "asc",
    ) -> Sequence[T.Span]:
        """A rollout's spans, in order; `attempt_id` may be "latest", None is every attempt.

        The `chat` spans of trained agents carry what was sampled: `prompt_token_ids`, `response_token_ids`, and the
        conversation as `gen_ai.input.messages` and `gen_ai.output.messages`.
        """
        number = None if attempt_id is None else await self.number(rollout_id, attempt_id)
        ours = await self.ours.query_spans(rollout_id, number)
        calls = await self.ours.query_calls(rollout_id, number)
        filters: list[Callable[[T.Span], bool]] = []
        exact = {"trace_id": trace_id, "span_id": span_id, "parent_id": parent_id, "name": name}
        parts = {
            "trace_id": trace_id_contains, "span_id": span_id_contains, "parent_id": parent_id_contains,
            "name": name_contains,
        }  # fmt: skip
        for key, value in exact.items():
            if value is not None:
                filters.append(lambda s, key=key, value=value: getattr(s, key) == value)
        for key, value in parts.items():
            if value is not None:
                filters.append(lambda s, key=key, value=value: value in (getattr(s, key) or ""))
        return page(T.numbered(with_calls(ours, calls)), filters, filter_logic, sort_by, sort_order, limit, offset)


def with_calls(spans: Sequence[own.Span], calls: Sequence[Call]) -> list[own.Span]:
    """Spans, those of sampled calls with the tokens and messages of their call."""
    by_span = {call.span_id: call for call in calls if call.span_id}
    said: dict[str, list[Any]] = {}
    by_id = {call.id: call for call in calls}
    for call in calls:
        parent = by_id.get(call.parent_id or "")
        before = [*said.get(parent.id, []), dict(parent.response)] if parent is not None and parent.response else []
        said[call.id] = [*before, *call.request.get("messages", [])]
    result = []
    for span in spans:
        call = by_span.get(span.span_id)
        if call is None or span.operation != semconv.CHAT:
            result.append(span)
            continue
        facts: Mapping[str, Any] = {
            T.PROMPT_TOKEN_IDS: call.prompt_ids.tolist(),
            T.RESPONSE_TOKEN_IDS: call.response_ids.tolist(),
            semconv.INPUT_MESSAGES: json.dumps(said[call.id], default=str),
            semconv.OUTPUT_MESSAGES: json.dumps([dict(call.response)] if call.response else [], default=str),
        }
        result.append(dataclasses.replace(span, attributes={**span.attributes, **facts}))
    return result
