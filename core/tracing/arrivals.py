"""Which of the gateway's answers reached this program: seen where their bytes arrive, below every SDK and framework.

An SDK that loses an answer sends its request again, and the gateway answers twice. The span of the request names the
responses that arrived whole (`semconv.RECEIVED`); the gateway's other calls of that span were seen by nobody.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from agl import semconv
from agl.tracing.context import Scope

RESPONSE_HEADER = "x-agl-response-id"
"""The gateway's responses have it: the id of the answer, before its first byte."""

_LAST_EVENT = re.compile(
    rb"^(data: \[DONE\])|^event: response\.(?:completed|incomplete|failed)"
    rb'|"(?:finish_reason|stop_reason|finishReason)":\s*"',
    re.M,
)
"""What ends a stream of any API; whoever reads no further has the whole answer. After the first of them no SDK does."""
_TAIL_BYTES = 64
"""The longest of these texts fits into so many."""

_lock = threading.Lock()
_scopes: weakref.WeakValueDictionary[str, Scope] = weakref.WeakValueDictionary()
_streams: weakref.WeakKeyDictionary[Scope, list[_Stream]] = weakref.WeakKeyDictionary()
"""Of the calls whose answers are streamed."""


def expect(scope: Scope) -> None:
    """Have the answers to requests with this scope's traceparent noted on its span."""
    _scopes[scope.traceparent] = scope


def left(scope: Scope) -> None:
    """Note that nobody reads the streams of this scope any more: what has not arrived by now is lost.

    The SDK's objects of a dropped stream may be collected in any order, its bytes after its span has ended.
    """
    for stream in _streams.pop(scope, ()):
        if not stream.whole:
            _note(scope, stream.response_id, lost=True)


@dataclass
class _Stream:
    """An answer that is streamed.

    Attributes:
        whole: whether its last event has arrived.
    """

    response_id: str
    whole: bool = False


class Arrival:
    """One request on the wire, from its sending to the end of its answer.

    Args:
        traceparent: of the request.
    """

    def __init__(self, traceparent: str) -> None:
        self._scope = _scopes.get(traceparent)
        if self._scope is not None:
            _note(self._scope, None)

    async def of_async(self, sending: Any, library: Any, *, stream: bool) -> Any:
        """As `of`, of a request that is being sent."""
        return self.of(await sending, library, stream=stream)

    def of(self, response: Any, library: Any, *, stream: bool) -> Any:
        """The response, which has arrived whole, or whose stream is followed to its end.

        Args:
            library: httpx or httpx2.
        """
        response_id = response.headers.get(RESPONSE_HEADER)
        if response_id is None or self._scope is None:
            return response
        # A framework may end its span before it reads the stream: then nobody can say later that it was lost.
        _note(self._scope, response_id)
        if stream and "content-encoding" not in response.headers:
            scope, progress = self._scope, _Stream(response_id)
            _streams.setdefault(scope, []).append(progress)
            response.stream = _followed(library)(
                response.stream, progress, lambda: _note(scope, response_id, lost=True)
            )
        return response


def _note(scope: Scope, response_id: str | None, *, lost: bool = False) -> None:
    # The root span of a whole process may be another process's.
    attributes = getattr(scope.span, "attributes", None)
    if attributes is None:
        return
    with _lock:
        received = [known for known in attributes.get(semconv.RECEIVED, ()) if known != response_id]
        if response_id is not None and not lost:
            received.append(response_id)
        scope.span.set_attribute(semconv.RECEIVED, received)


class _Followed:
    """The bytes of a stream, unchanged; `lost` is called if they end before its last event."""

    def __init__(self, stream: Any, progress: _Stream, lost: Any) -> None:
        self._stream = stream
        self._progress = progress
        self._lost = lost
        self._tail = b""
        self._over = False

    def _take(self, chunk: bytes) -> bytes:
        if not self._over:
            seen = self._tail + chunk
            for last in _LAST_EVENT.finditer(seen):
                self._progress.whole = True
                self._over = last[1] is not None
            self._tail = seen[-_TAIL_BYTES:]
        return chunk

    def _end(self) -> None:
        if not self._progress.whole:
            self._lost()

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._stream:
                yield self._take(chunk)
        except Exception:
            # The SDK raises it, too: whatever has arrived, the agent gets an error.
            self._progress.whole = self._over
            raise
        finally:
            self._end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                yield self._take(chunk)
        except Exception:
            self._progress.whole = self._over
            raise
        finally:
            self._end()

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._end()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._end()


_classes: dict[Any, type] = {}


def _followed(library: Any) -> Any:
    """`_Followed` as a byte stream of this library, sync and async."""
    if library not in _classes:
        _classes[library] = type("Followed", (_Followed, library.SyncByteStream, library.AsyncByteStream), {})
    return _classes[library]
