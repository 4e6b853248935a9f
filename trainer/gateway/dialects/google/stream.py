"""The stream of Google's API: responses, as server-sent events or as the items of one array."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import Choice, Reply, ServedPolicy
from agl.trainer.gateway.dialects.deltas import MessageDeltas
from agl.trainer.gateway.dialects.error_forms import google_error
from agl.trainer.gateway.dialects.google.answer import parts, response
from agl.trainer.gateway.dialects.google.body import GoogleRequest
from agl.trainer.gateway.errors import RequestError


class GoogleStream:
    """The responses of all candidates. Invariant: their parts add up to what `answer` returns."""

    before = b"data: "
    after = b"\n\n"
    end = b""
    """What surrounds each response, and what ends them."""

    def __init__(self, pending: PendingRequest, served: ServedPolicy, request: GoogleRequest) -> None:
        self._pending = pending
        self._served = served
        self._request = request
        self._deltas = MessageDeltas(request.chat, served.rendering)

    def push(self, choice: Choice) -> Iterator[bytes]:
        """Responses with what was sampled of a choice since the last call."""
        for delta in self._deltas.push(choice):
            if found := parts(delta, self._request):
                yield self._written(response(self._pending, self._served, {choice.number: found}))

    def finish(self, replies: Sequence[Reply]) -> Iterator[bytes]:
        """The response that completes every candidate."""
        deltas = {i: self._deltas.finish(i, reply) for i, reply in enumerate(replies)}
        rest = {i: [part for delta in of for part in parts(delta, self._request)] for i, of in deltas.items()}
        yield self._written(response(self._pending, self._served, rest, replies)) + self.end

    def fail(self, error: RequestError) -> Iterator[bytes]:
        """The error of an answer that broke off."""
        yield self._written(google_error(error)) + self.end

    def _written(self, data: Any) -> bytes:
        return self.before + json.dumps(data).encode() + self.after


class ArrayStream(GoogleStream):
    """The same as one JSON array."""

    before = b"["
    after = b""
    end = b"]"

    def _written(self, data: Any) -> bytes:
        written = super()._written(data)
        self.before = b",\r\n"
        return written
