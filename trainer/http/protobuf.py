"""The shape of a protobuf message, before it is parsed: two bytes can be an object of a hundred.

Source: Protocol Buffers, "Encoding".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl.trainer.http.limits import Limits, Refused, setting

Fields = Mapping[int, Any]
"""Number of a field that holds a message -> the `Fields` of that message."""

_VARINT = 0
_EIGHT_BYTES = 1
_LENGTH = 2
_FOUR_BYTES = 5
"""Wire types."""
MOST_BYTES = 10
"""Of a number, which has 64 bits at most."""


def message_fields(descriptor: Any) -> Fields:
    """The fields of a message that hold messages, by its descriptor."""
    known: dict[str, dict[int, Any]] = {}

    def fields_of(descriptor: Any) -> dict[int, Any]:
        if descriptor.full_name not in known:
            fields = known[descriptor.full_name] = {}
            for field in descriptor.fields:
                if field.message_type is not None:
                    fields[field.number] = fields_of(field.message_type)
        return known[descriptor.full_name]

    return fields_of(descriptor)


def check_protobuf(body: bytes, fields: Fields, limits: Limits) -> None:
    """Refuse a message by its shape.

    Exact for a valid message; of another one, it counts at least what stands before the error.

    Args:
        fields: of the message, as `message_fields` finds them.

    Raises:
        Refused: 400, its messages are nested too deep; 413, they have too many fields.
    """
    # A field has two bytes or more. The parser counts the depth of what is shorter.
    if len(body) <= 2 * limits.body_values:
        return
    try:
        _check(body, fields, limits)
    except IndexError:
        # It ends within a number, which the parser says.
        return


def _check(body: bytes, fields: Fields, limits: Limits) -> None:
    open_messages: list[tuple[int, Fields]] = [(len(body), fields)]
    position = count = 0
    while open_messages:
        end, fields = open_messages[-1]
        if position >= end:
            open_messages.pop()
            continue
        count += 1
        if count > limits.body_values:
            found = f"the body has {count} fields or more, the limit is {limits.body_values}"
            raise Refused(413, f"{found}: {setting('body_values')}", "request_too_large")
        key, position = _number(body, position)
        kind = key & 7
        if kind == _LENGTH:
            length, position = _number(body, position)
            inner = fields.get(key >> 3)
            if inner is None:
                position += length
                continue
            open_messages.append((position + length, inner))
            if len(open_messages) > limits.json_depth:
                found = f"the body is nested {len(open_messages)} deep or more, the limit is {limits.json_depth}"
                raise Refused(400, f"{found}: {setting('json_depth')}", "invalid_protobuf")
        elif kind == _VARINT:
            _, position = _number(body, position)
        elif kind == _EIGHT_BYTES:
            position += 8
        elif kind == _FOUR_BYTES:
            position += 4


def _number(body: bytes, position: int) -> tuple[int, int]:
    """The number that begins at a position, in groups of seven bits, and the position behind it.

    Raises:
        Refused: 400, it has more bytes than a number of 64 bits can have.
    """
    byte = body[position]
    position += 1
    if byte < 128:
        return byte, position
    number = byte & 127
    shift = 7
    while byte >= 128:
        if shift >= 7 * MOST_BYTES:
            raise Refused(400, f"a number has more than {MOST_BYTES} bytes", "invalid_protobuf")
        byte = body[position]
        position += 1
        number |= (byte & 127) << shift
        shift += 7
    return number, position
