"""Convert spans to and from OTLP in JSON.

Source: OpenTelemetry Protocol 1.x, `ExportTraceServiceRequest` in the JSON mapping of protobuf, in which trace and span
ids are hex and 64-bit integers are strings.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl.mdp.spans import Event, Span

_STATUS = ("unset", "ok", "error")
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError, IndexError, ArithmeticError, RecursionError)


def encode(spans: Iterable[Span]) -> dict[str, Any]:
    """An export request that holds these spans."""
    return {
        "resourceSpans": [
            {"resource": {}, "scopeSpans": [{"scope": {"name": "agl"}, "spans": [_encode(span) for span in spans]}]}
        ]
    }


def decode(request: Any, *, rollout_id: str, attempt: int) -> list[Span]:
    """The spans of an export request, assigned to this attempt.

    Raises:
        ValueError: it is not an export request.
    """
    try:
        scopes = (
            scope for resource in request.get("resourceSpans") or () for scope in resource.get("scopeSpans") or ()
        )
        return [_decode(span, rollout_id, attempt) for scope in scopes for span in scope.get("spans") or ()]
    except _MALFORMED as error:
        raise ValueError(f"not an OTLP export request in JSON: {type(error).__name__}: {error}") from error


def decode_each(request: Any) -> Iterator[tuple[dict[str, Any], Span | ValueError]]:
    """(resource attributes, span or the error in it) of each span of an export request; spans have no attempt.

    Raises:
        ValueError: it is not an export request.
    """
    try:
        for resource in request.get("resourceSpans") or ():
            resource_attributes = _values((resource.get("resource") or {}).get("attributes"))
            for scope in resource.get("scopeSpans") or ():
                for span in scope.get("spans") or ():
                    try:
                        decoded = _decode(span, "", 0)
                        # In protobuf, no message is an empty one.
                        yield resource_attributes, replace(decoded, status_message=decoded.status_message or None)
                    except _MALFORMED as error:
                        yield resource_attributes, ValueError(f"a span: {type(error).__name__}: {error}")
    except _MALFORMED as error:
        raise ValueError(f"not an OTLP export request in JSON: {type(error).__name__}: {error}") from error


def _encode(span: Span) -> dict[str, Any]:
    encoded = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": _nanos(span.start),
        "endTimeUnixNano": _nanos(span.end),
        "attributes": _attributes(span.attributes),
        "events": [
            {"timeUnixNano": _nanos(e.time), "name": e.name, "attributes": _attributes(e.attributes)}
            for e in span.events
        ],
        "status": {"code": _STATUS.index(span.status)},
    }
    if span.status_message is not None:
        encoded["status"]["message"] = span.status_message
    if span.parent_id is not None:
        encoded["parentSpanId"] = span.parent_id
    return encoded


def _decode(span: Mapping[str, Any], rollout_id: str, attempt: int) -> Span:
    status = span.get("status") or {}
    start = _seconds(span.get("startTimeUnixNano", 0))
    return Span(
        trace_id=_hex(span["traceId"], 32),
        span_id=_hex(span["spanId"], 16),
        parent_id=_hex(span["parentSpanId"], 16) if (span.get("parentSpanId") or "").strip("0") else None,
        rollout_id=rollout_id,
        attempt=attempt,
        name=str(span.get("name", "")),
        start=start,
        # Its sender's clock may have been set back meanwhile.
        end=max(start, _seconds(span.get("endTimeUnixNano", 0))),
        status=_STATUS[_code(status.get("code", 0))],
        status_message=None if status.get("message") is None else str(status["message"]),
        attributes=_values(span.get("attributes")),
        events=tuple(
            Event(str(e.get("name", "")), _seconds(e.get("timeUnixNano", 0)), _values(e.get("attributes")))
            for e in span.get("events") or ()
        ),
    )


def _code(value: Any) -> int:
    # Protobuf's mapping accepts an enum's name as well as its number.
    names = {"STATUS_CODE_UNSET": 0, "STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}
    code = names.get(value) if isinstance(value, str) else int(value)
    # A newer version's is none that is known.
    return code if code is not None and 0 <= code < len(_STATUS) else 0


def _nanos(seconds: float) -> str:
    return str(round(seconds * 1e9))


def _seconds(nanos: Any) -> float:
    number = int(nanos)
    if not 0 <= number < 2**64:
        raise ValueError("a time is not unsigned nanoseconds of 64 bits")
    return number / 1e9


def _hex(text: Any, digits: int) -> str:
    # `fromhex` alone skips white space.
    if not isinstance(text, str) or len(text) != digits or not text.isalnum():
        raise ValueError(f"an id of {digits} hex digits is {text!r}")
    if not any(bytes.fromhex(text)):
        raise ValueError("an id is all zeros")
    return text.lower()


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _any_value(value)} for key, value in values.items()]


def _any_value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            # JSON has neither NaN nor infinity; protobuf's mapping writes them as strings.
            special = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
            return {"doubleValue": value if math.isfinite(value) else special}
        case Sequence() if not isinstance(value, str | bytes):
            return {"arrayValue": {"values": [_any_value(v) for v in value]}}
    return {"stringValue": value if isinstance(value, str) else str(value)}


def _values(attributes: Any) -> dict[str, Any]:
    return {str(a["key"]): _value(a.get("value") or {}) for a in attributes or ()}


def _value(any_value: Mapping[str, Any]) -> Any:
    for kind, value in any_value.items():
        match kind:
            case "stringValue":
                return str(value)
            case "boolValue":
                return bool(value)
            case "intValue":
                return int(value)
            case "doubleValue":
                return float(value)
            case "arrayValue":
                return [_value(v) for v in value.get("values") or ()]
            case "kvlistValue":
                return _values(value.get("values"))
            case "bytesValue":
                return base64.b64decode(value, validate=True).hex()
    return None
