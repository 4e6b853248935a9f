"""Sends stored spans to a tracing backend (Jaeger, Phoenix, any collector) as OTLP over HTTP in protobuf.

Source: OpenTelemetry Protocol 1.x, OTLP/HTTP: retryable responses, `Retry-After`, partial success.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import tenacity

from agl.errors import ConfigError, ExportError
from agl.extras import missing
from agl.mdp.spans import Span
from agl.tracing import otel_sdk
from agl.trainer.report.export.json_files import to_json
from agl.trainer.report.export.rows import Record

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

MAX_SPANS = 512
MAX_BYTES = 4 << 20
"""Limits of one request, before compression; a single span may be longer."""
TRIES = 6
LONGEST_WAIT = 30.0
RETRYABLE = (429, 502, 503, 504)
TIMEOUT_SECONDS = 30.0


class _Retryable(Exception):
    """The receiver does not respond, or asks for a retry, perhaps after some seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


def traces_url(url: str) -> str:
    """The URL to which spans are posted: OTLP's default path is added to a base such as "http://localhost:4318".

    Raises:
        ConfigError: this is no http(s) URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--otlp is {url!r}, not an http(s) URL", hint="for example --otlp http://localhost:4318")
    return url if parts.path not in ("", "/") else parts._replace(path="/v1/traces").geturl()


async def send(
    rollouts: AsyncIterable[Record],
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    sent: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Send the spans of rollouts, with ids, parents, times, events and status as they are stored.

    Args:
        rollouts: the rollouts with their spans.
        url: as for `traces_url`.
        headers: added to each request.
        sent: called after each rollout.

    Returns:
        The URL, and the numbers of `rollouts`, `spans` and `requests`.

    Raises:
        ConfigError: the URL is not usable, or the encoder is not installed.
        ExportError: the receiver cannot be reached, or refuses spans.
    """
    otel_sdk.load()
    from opentelemetry.sdk.resources import Resource

    url = traces_url(url)
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "agl")})
    n_rollouts = n_spans = n_requests = n_rejected = 0
    reason = ""
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, headers=dict(headers or {})) as client:
        async for record in rollouts:
            ready = [readable(span, resource) for span in record.spans]
            for start in range(0, len(ready), MAX_SPANS):
                for request in _requests(ready[start : start + MAX_SPANS]):
                    rejected, message = await _post(client, url, request.SerializeToString())
                    n_requests = n_requests + 1
                    n_rejected = n_rejected + rejected
                    reason = message or reason
            n_rollouts = n_rollouts + 1
            n_spans = n_spans + len(ready)
            sent()
    if n_rejected:
        raise ExportError(
            f"the receiver rejected {n_rejected} of {n_spans} spans: {reason or 'it does not say why'}",
            hint="it has the others; which spans it rejects is its own rule",
            url=url,
        )
    return {"url": url, "rollouts": n_rollouts, "spans": n_spans, "requests": n_requests}


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """A stored span as an object of OpenTelemetry's SDK."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span_id: str) -> SpanContext:
        return SpanContext(int(span.trace_id, 16), int(span_id, 16), False, TraceFlags(TraceFlags.SAMPLED))

    status = StatusCode[span.status.upper()]
    return ReadableSpan(
        name=_utf8(span.name),
        context=context(span.span_id),
        parent=None if span.parent_id is None else context(span.parent_id),
        resource=resource,
        attributes=_attributes(span.attributes),
        events=[Event(_utf8(e.name), _attributes(e.attributes), _nanos(e.time)) for e in span.events],
        kind=SpanKind.INTERNAL,
        # In OpenTelemetry only errors have a description.
        status=Status(status, _utf8(span.status_message or "") or None if status is StatusCode.ERROR else None),
        start_time=_nanos(span.start),
        end_time=_nanos(max(span.start, span.end)),
        instrumentation_scope=InstrumentationScope("agl"),
    )


def _requests(spans: Sequence[ReadableSpan]) -> Iterator[ExportTraceServiceRequest]:
    """Requests with these spans, none longer than the limit if it has several spans."""
    try:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    except ImportError:
        raise missing("OTLP", "opentelemetry.exporter.otlp", "export") from None
    request = encode_spans(spans)
    if len(spans) > 1 and request.ByteSize() > MAX_BYTES:
        half = len(spans) // 2
        yield from _requests(spans[:half])
        yield from _requests(spans[half:])
    else:
        yield request


async def _post(client: httpx.AsyncClient, url: str, body: bytes) -> tuple[int, str]:
    """Send one request; the number of rejected spans, and the reason."""
    tries = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(_Retryable),
        stop=tenacity.stop_after_attempt(TRIES),
        wait=_wait,
        reraise=True,
    )
    try:
        response = await tries(_once, client, url, gzip.compress(body))
    except _Retryable as error:
        raise ExportError(
            f"the receiver took no spans in {TRIES} tries: {error}",
            hint="check that it runs, and that this is its address for OTLP over HTTP (port 4318, not gRPC's 4317)",
            url=url,
        ) from error
    if not response.is_success:
        raise ExportError(
            f"the receiver refused the spans: {_summary(response)}",
            hint="check its address and the --header that it requires",
            url=url,
        )
    return _partial(response)


async def _once(client: httpx.AsyncClient, url: str, content: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
    try:
        response = await client.post(url, content=content, headers=headers)
    except httpx.TransportError as error:
        raise _Retryable(f"{type(error).__name__}: {error}") from error
    if response.status_code in RETRYABLE:
        after = response.headers.get("retry-after", "")
        raise _Retryable(_summary(response), float(after) if after.isdigit() else 0.0)
    return response


_backoff = tenacity.wait_exponential_jitter(initial=0.2, max=LONGEST_WAIT)


def _wait(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    return max(_backoff(state), min(getattr(error, "after", 0.0), LONGEST_WAIT))


def _partial(response: httpx.Response) -> tuple[int, str]:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        partial = ExportTraceServiceResponse.FromString(response.content).partial_success
    except DecodeError:
        return 0, ""  # some receivers answer with text
    return partial.rejected_spans, partial.error_message


def _summary(response: httpx.Response) -> str:
    text = "".join(c if c.isprintable() else " " for c in response.text[:200]).strip()
    return f"HTTP {response.status_code} {text}".strip()


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_utf8(k): _value(v) for k, v in values.items() if v is not None}


def _value(value: Any) -> Any:
    """A value of an attribute in OpenTelemetry; other values become JSON text."""
    match value:
        case bool() | float():
            return value
        case int() if -(1 << 63) <= value < 1 << 63:
            return value
        case str():
            return _utf8(value)
        case list() | tuple() if len({type(v) for v in value}) < 2 and all(
            isinstance(v, bool | float | str) or (isinstance(v, int) and -(1 << 63) <= v < 1 << 63) for v in value
        ):
            return [_value(v) for v in value]
    return to_json(value).decode()


def _utf8(text: str) -> str:
    """Valid UTF-8, as protobuf requires: lone surrogates become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _nanos(seconds: float) -> int:
    return round(seconds * 1e9)
