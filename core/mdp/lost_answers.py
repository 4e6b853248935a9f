"""Calls whose answers never reached their agent: the network lost them, and the client asked again or gave up.

Invariant: of the answers to one request at most the one that its client received is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from agl import semconv
from agl.mdp.spans import Span
from agl.mdp.types import Call

RETRY = "retry"
"""Key of `Call.request`: how often the client had sent this request before, as its SDK says; left out for 0."""
LOST = "its answer did not reach the agent, which is not trained on it"
"""The error of such a call."""


def lost_answers(calls: Sequence[Call], spans: Sequence[Span]) -> list[Call]:
    """The calls of an attempt that nobody received, as calls that were cancelled.

    A span of agl's own client names the responses that arrived (`semconv.RECEIVED`). Of a program that has no such span
    (in another language), a call is lost where its SDK sent an equal request again, by the SDK's retry header; unless
    another call continues its answer, which shows that it arrived. A client without an SDK (httpx, requests, aiohttp)
    has neither: what it drops unread after it was sent whole counts as received.

    Args:
        calls: of one attempt.
        spans: likewise.
    """
    received = {s.span_id: s.attributes[semconv.RECEIVED] for s in spans if semconv.RECEIVED in s.attributes}
    known = {s.span_id for s in spans}
    ordered = sorted(calls, key=lambda call: (call.index, call.id))
    lost = {
        call.id: call
        for call in ordered
        if call.span_id in received and _response_id(call) not in received[call.span_id]
    }
    continued = {call.parent_id for call in ordered}
    replaced: set[int] = set()
    for again in ordered:
        if not again.request.get(RETRY) or again.span_id in received:
            continue
        earlier = [
            call
            for call in ordered
            if call.index < again.index and call.index not in replaced and _is_retry(again, call, known)
        ]
        earlier = [call for call in earlier if call.id not in continued]
        if earlier:
            index = earlier[-1].index
            replaced.add(index)
            lost |= {call.id: call for call in earlier if call.index == index}
    return [replace(c, finish_reason="cancelled", error=LOST) for c in lost.values() if c.error is None]


def _response_id(call: Call) -> str:
    """The id of the response whose choice this is."""
    return call.id.partition(":")[0]


def _is_retry(again: Call, call: Call, known: Collection[str | None]) -> bool:
    """Whether a request can be an earlier one, sent again by the same client."""
    spans = [each.span_id if each.span_id in known else None for each in (again, call)]
    return (
        call.agent == again.agent
        and spans[0] == spans[1]
        and int(call.request.get(RETRY, 0)) < int(again.request[RETRY])
        and call.request.get("asked") == again.request.get("asked")
        and np.array_equal(call.prompt_ids, again.prompt_ids)
    )
