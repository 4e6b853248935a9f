"""OTLP over HTTP, `POST /v1/traces`: stores spans of any OpenTelemetry exporter, in protobuf or JSON, with an attempt.

A span belongs to the attempt that `agl.rollout.id` and `agl.attempt` name, on the span or else on its resource
(`OTEL_RESOURCE_ATTRIBUTES=agl.rollout.id=...`); without `agl.attempt`, to the rollout's last one. Spans that name none
belong to the attempt that another span of their trace names, whichever comes first. A trace of which none does is a
rollout "trace-<trace id>" of mode "collect", which ends with its root span; one whose root does not come, since another
service has it, ends when nothing of it has come for five minutes. Its task is what it was asked (`foreign.question`).

With AGL_CAPTURE_CONTENT=0, known facts alone are stored (`facts_alone`).

Protobuf is decoded directly: by way of `google.protobuf.json_format` a request takes about twice as long.

Source: OpenTelemetry Protocol 1.x, OTLP/HTTP: content types, gzip, partial success, `google.rpc.Status` for failures.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl import semconv
from agl.errors import StoreError
from agl.extras import install_line
from agl.mdp.evaluations import evaluated
from agl.mdp.order import in_order
from agl.mdp.spans import Event, Span, facts_alone
from agl.messages import foreign
from agl.tracing import otlp
from agl.trainer.http.auth import Role
from agl.trainer.http.bodies import body_in_turn, json_value, media_type, unpacked
from agl.trainer.http.limits import Limits, Refused
from agl.trainer.http.protobuf import Fields, check_protobuf, message_fields
from agl.trainer.http.responses import RETRY_SECONDS
from agl.trainer.http.turns import Turns
from agl.trainer.store.base import Store
from agl.trainer.store.types import ATTEMPT_TERMINAL, Attempt, NewRollout, RolloutConfig
from agl.trainer.wire.methods import loads

log = logging.getLogger("agl")
PATH = "/v1/traces"
QUIET_SECONDS = 300.0
"""How long nothing of a trace without a root has come when it ends: longer than most calls of models and tools."""
PROTOBUF = "application/x-protobuf"
JSON = "application/json"
_WORKER = "otlp"
_STATUSES = ("unset", "ok", "error")
_MOST_TRACES = 10_000
"""Traces of which it is remembered that a span named an attempt."""
_RPC_CODES = {400: 3, 401: 16, 403: 7, 413: 8, 415: 3, 503: 14}
"""HTTP status -> google.rpc.Code."""


class Traces:
    """The route of spans.

    Args:
        store: where spans are stored.
        role: the role of a request's sender; may raise `Refused`.
        is_leased: whether a request shows the secret of an attempt's lease, which a runner needs.
        turns: of a request's sender.
    """

    def __init__(
        self,
        store: Store,
        role: Callable[[Request], Role],
        is_leased: Callable[[Request, str, int], Awaitable[bool]],
        turns: Callable[[Request], Awaitable[Turns]],
    ) -> None:
        self._store = store
        self._role = role
        self._is_leased = is_leased
        self._turns = turns
        self._opening = asyncio.Lock()
        self._capture_content = os.environ.get("AGL_CAPTURE_CONTENT", "1") != "0"
        self._named: OrderedDict[str, tuple[Any, Any]] = OrderedDict()
        """Trace -> the rollout and the attempt that one of its spans names."""
        self._rootless: dict[str, float] = {}
        """Rollout of a trace whose root has not come -> when the last of its spans came, on the monotonic clock."""
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to end the traces whose roots do not come, also those that were left by an earlier server."""
        self._ending = self._ending or asyncio.create_task(self._end_rootless())

    def stop(self) -> None:
        """The opposite of `start`."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def route(self) -> Route:
        return Route(PATH, self._export, methods=["POST"])

    async def _export(self, request: Request) -> Response:
        kind = media_type(request)
        try:
            role = self._role(request)
            if kind not in (PROTOBUF, JSON):
                raise Refused(415, f"spans are taken as {PROTOBUF} or {JSON}", "unsupported_media_type")
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            turns = functools.partial(self._turns, request)
            async with body_in_turn(request, turns, large=encoding != "identity") as body:
                received = await body.read(_decode, encoding, kind, body.limits)
                if not self._capture_content:
                    received = [(at, facts_alone(span) if isinstance(span, Span) else span) for at, span in received]
                rejected = await self._store_spans(request, role, received)
        except ValueError as error:
            return _failure(kind, 400, str(error))
        except Refused as refused:
            return _failure(kind, refused.status, refused.message)
        except StoreError as error:
            return _failure(kind, 503, error.message)
        return _success(kind, rejected)

    async def _store_spans(self, request: Request, role: Role, received: list[_Received]) -> list[str]:
        """Store the spans that belong to an attempt; the reasons why the others do not."""
        rejected: list[str] = []
        traces: dict[str, list[Span]] = {}
        rollouts: dict[str, list[tuple[int | None, Span]]] = {}
        if role == "operator":
            self._remember(received)
        for resource, span in received:
            if isinstance(span, ValueError):
                rejected.append(str(span))
                continue
            rollout_id = span.attributes.get(semconv.ROLLOUT_ID, resource.get(semconv.ROLLOUT_ID))
            value = span.attributes.get(semconv.ATTEMPT, resource.get(semconv.ATTEMPT))
            if rollout_id is None and role == "operator":
                rollout_id, value = self._named.get(span.trace_id, (None, None))
            if rollout_id is None and role != "operator":
                rejected.append(f"a runner's spans name their attempt: {semconv.ROLLOUT_ID}, {semconv.ATTEMPT}")
                continue
            if rollout_id is None:
                traces.setdefault(span.trace_id, []).append(span)
                continue
            try:
                number = None if value is None else int(value)
            except (TypeError, ValueError, ArithmeticError):
                rejected.append(f"{semconv.ATTEMPT} is {value!r}")
                continue
            rollouts.setdefault(str(rollout_id), []).append((number, span))
        kept: list[Span] = []
        for rollout_id, spans in rollouts.items():
            attempts = {a.attempt: a for a in await self._attempts(rollout_id)}
            if role != "operator":
                # No span after the end, and none of another runner's attempt.
                attempts = {
                    n: a
                    for n, a in attempts.items()
                    if a.status not in ATTEMPT_TERMINAL and await self._is_leased(request, rollout_id, n)
                }
            for number, span in spans:
                attempt = attempts.get(max(attempts, default=0) if number is None else number)
                if attempt is None:
                    rejected.append(f"rollout {rollout_id} has no such attempt open to this key")
                else:
                    kept.append(dataclasses.replace(span, rollout_id=rollout_id, attempt=attempt.attempt))
        attempts_of = {span.trace_id: (span.rollout_id, span.attempt) for span in kept}
        for trace_id, spans in traces.items():
            rollout_id = f"trace-{trace_id}"
            await self._open_trace(rollout_id, spans)
            kept += [dataclasses.replace(span, rollout_id=rollout_id, attempt=1) for span in spans]
        await self._store.add_spans([*kept, *evaluated(kept)])
        if role == "operator":
            for trace_id, (rollout_id, attempt) in attempts_of.items():
                await self._take_over(f"trace-{trace_id}", rollout_id, attempt)
        for trace_id, spans in traces.items():
            roots = [span for span in spans if span.parent_id is None]
            rollout_id = f"trace-{trace_id}"
            if roots or _asked(spans) is not None:
                await self._set_task(rollout_id, ends=bool(roots))
            if roots:
                self._rootless.pop(rollout_id, None)
                await self._end_trace(rollout_id, roots)
            else:
                self._rootless[rollout_id] = time.monotonic()
        return rejected

    async def _end_rootless(self) -> None:
        """End the traces of which nothing has come for long, by the outermost spans that have come."""
        resumed = False
        while True:
            try:
                if not resumed:
                    for attempt in await self._store.query_open_attempts(limit=_MOST_TRACES):
                        if attempt.worker_id == _WORKER:
                            self._rootless.setdefault(attempt.rollout_id, time.monotonic())
                    resumed = True
                for rollout_id, since in [*self._rootless.items()]:
                    if time.monotonic() - since < QUIET_SECONDS:
                        continue
                    spans = await self._store.query_spans(rollout_id)
                    if spans:
                        await self._set_task(rollout_id, ends=True)
                        await self._end_trace(rollout_id, _outermost(spans))
                    if self._rootless.get(rollout_id) == since:
                        del self._rootless[rollout_id]
            except StoreError as error:
                log.warning("cannot end the traces whose root spans do not come: %s", error)
            await asyncio.sleep(QUIET_SECONDS / 10)

    def _remember(self, received: list[_Received]) -> None:
        """Remember which attempts the spans themselves name."""
        for _, span in received:
            if isinstance(span, Span) and (rollout_id := span.attributes.get(semconv.ROLLOUT_ID)) is not None:
                self._named[span.trace_id] = rollout_id, span.attributes.get(semconv.ATTEMPT)
                self._named.move_to_end(span.trace_id)
        while len(self._named) > _MOST_TRACES:
            self._named.popitem(last=False)

    async def _take_over(self, trace: str, rollout_id: str, attempt: int) -> None:
        """Assign the spans of a trace that came before the one that names their attempt."""
        if trace != rollout_id and await self._attempts(trace):
            await self._store.move_spans(trace, rollout_id, attempt)
            await self._store.cancel_rollouts([trace])

    async def _attempts(self, rollout_id: str) -> list[Attempt]:
        try:
            return await self._store.query_attempts(rollout_id)
        except StoreError:
            return []

    async def _open_trace(self, rollout_id: str, spans: list[Span]) -> None:
        """Create the rollout of a trace, with one open attempt, unless it exists."""
        async with self._opening:
            if await self._attempts(rollout_id):
                return
            # In a separate run, so that no runner leases it.
            new = NewRollout(
                task=_task(spans),
                mode="collect",
                run_id=rollout_id,
                config=RolloutConfig(max_attempts=1),
                metadata={"otlp": True},
                rollout_id=rollout_id,
            )
            await self._store.enqueue_rollouts([new])
            if await self._store.dequeue_rollout(_WORKER, run_id=rollout_id) is not None:
                await self._store.update_attempt(rollout_id, 1, "running")

    async def _set_task(self, rollout_id: str, *, ends: bool) -> None:
        """Set a trace's task by all of its spans that have come: where it `ends`, or has none but its root's name."""
        rollout = await self._store.get_rollout(rollout_id)
        if not ends and "trace" not in rollout.task:
            return
        task = _task(await self._store.query_spans(rollout_id))
        if task != rollout.task:
            await self._store.update_rollout(rollout_id, {"task": task})

    async def _end_trace(self, rollout_id: str, outermost: Sequence[Span]) -> None:
        (attempt, *_) = await self._store.query_attempts(rollout_id)
        if attempt.status not in ATTEMPT_TERMINAL:
            failed = next((span for span in outermost if span.status == "error"), None)
            error = failed.status_message if failed else outermost[0].status_message
            await self._store.update_attempt(rollout_id, 1, "failed" if failed else "succeeded", error=error)


def _task(spans: Sequence[Span]) -> dict[str, Any]:
    """A trace's task: what its root was asked, or else the first call; the root's name if neither is recorded."""
    asked = _asked(spans)
    return {"trace": _outermost(spans)[0].name} if asked is None else asked


def _asked(spans: Sequence[Span]) -> dict[str, Any] | None:
    """What a trace's root was asked, or else the first call; None if neither is recorded."""
    return next((asked for s in [*_outermost(spans), *in_order(spans)] if (asked := foreign.question(s))), None)


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """The roots; if none has come, the spans whose parents have not."""
    known = {span.span_id for span in spans}
    roots = [span for span in spans if span.parent_id is None]
    return in_order(roots or [span for span in spans if span.parent_id not in known] or spans)


_Received = tuple[dict[str, Any], "Span | ValueError"]
"""A resource's attributes, and one of its spans or the error in it."""


def _decode(body: bytes, encoding: str, kind: str, limits: Limits) -> list[_Received]:
    """The spans of a request's body.

    Raises:
        ValueError: it cannot be decoded. Refused: it has more than the limits allow.
    """
    body = unpacked(body, encoding, limits.body_bytes)
    if kind == JSON:
        return list(otlp.decode_each(json_value(body, limits, loads)))
    return list(_from_protobuf(body, limits))


@functools.cache
def _request_fields() -> Fields:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    return message_fields(ExportTraceServiceRequest.DESCRIPTOR)


def _from_protobuf(body: bytes, limits: Limits) -> Iterator[_Received]:
    try:
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError:
        raise ValueError(f"protobuf is not read here; {install_line('server')}, or send JSON") from None
    check_protobuf(body, _request_fields(), limits)
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"not an OTLP export request: {error}") from None
    for resource in request.resource_spans:
        attributes = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                try:
                    yield attributes, _span(span)
                except ValueError as error:
                    yield attributes, error


def _span(span: Any) -> Span:
    parent = span.parent_span_id
    return Span(
        trace_id=_id(span.trace_id, 16),
        span_id=_id(span.span_id, 8),
        parent_id=_id(parent, 8) if any(parent) else None,
        rollout_id="",
        attempt=0,
        name=span.name,
        start=span.start_time_unix_nano / 1e9,
        # Its sender's clock may have been set back meanwhile.
        end=max(span.start_time_unix_nano, span.end_time_unix_nano) / 1e9,
        status=_STATUSES[span.status.code] if 0 <= span.status.code < len(_STATUSES) else "unset",
        status_message=span.status.message or None,
        attributes=_attributes(span.attributes),
        events=tuple(Event(e.name, e.time_unix_nano / 1e9, _attributes(e.attributes)) for e in span.events),
    )


def _id(data: bytes, length: int) -> str:
    if len(data) != length or not any(data):
        raise ValueError(f"a span's id is not {length} bytes, or is all zeros")
    return data.hex()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    match kind:
        case None:
            return None
        case "array_value":
            return [_value(v) for v in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return value.bytes_value.hex()
    return getattr(value, kind)


# -- answers ------------------------------------------------------------------------------------------------------
def _success(kind: str, rejected: list[str]) -> Response:
    message = f"{len(rejected)} spans were not kept; the first because: {rejected[0]}" if rejected else ""
    if kind == JSON:
        partial = {"partialSuccess": {"rejectedSpans": str(len(rejected)), "errorMessage": message}} if rejected else {}
        return Response(orjson.dumps(partial), media_type=JSON)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    if rejected:
        response.partial_success.rejected_spans = len(rejected)
        response.partial_success.error_message = message
    return Response(response.SerializeToString(), media_type=PROTOBUF)


def _failure(kind: str, status: int, message: str) -> Response:
    headers = {"retry-after": str(RETRY_SECONDS)} if status == 503 else None
    code = _RPC_CODES.get(status, 13 if status >= 500 else 3)
    if kind == PROTOBUF:
        try:
            from google.rpc.status_pb2 import Status

            body = Status(code=code, message=message).SerializeToString()
            return Response(body, status, headers, PROTOBUF)
        except ImportError:
            pass
    return Response(orjson.dumps({"code": code, "message": message}), status, headers, JSON)
