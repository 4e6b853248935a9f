"""Plain data as JSON without loss, and messages of bounded length through pipes.

Invariant: what is read is of exactly the types below, whoever wrote it: no subclass, and no object with methods of its
own.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

Refer = Callable[[Any], list[Any]]

_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "float": (float, repr, float),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, str, complex),
    "Decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
}
_NUMBERS: dict[str, tuple[type, Callable[[Any], tuple[int, ...]], Callable[..., Any]]] = {
    "range": (range, lambda r: (r.start, r.stop, r.step), range),
    "Fraction": (Fraction, lambda f: (f.numerator, f.denominator), Fraction),
    "timedelta": (timedelta, lambda d: (d.days, d.seconds, d.microseconds), timedelta),
}
_NAMES = {kind: name for name, kind in _CONTAINERS.items()}
_NAMES |= {kind: name for table in (_TEXTS, _NUMBERS) for name, (kind, *_) in table.items()}
_EXACT = 1 << 53


class Malformed(Exception):
    """A message that is too long, or no message."""


def pack(value: Any, refer: Refer) -> Any:
    """A value as what JSON can hold. A list stands for everything but None, bool, str, float and int.

    Args:
        refer: gives the list that stands for a value of another type, or raises.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int and -_EXACT < value < _EXACT:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is dict:
        return ["dict", *(pack(part, refer) for pair in value.items() for part in pair)]
    name = _NAMES.get(kind)
    if name in _CONTAINERS:
        return [name, *(pack(part, refer) for part in value)]
    if name in _TEXTS:
        return [name, _TEXTS[name][1](value)]
    if name in _NUMBERS:
        return [name, *(pack(part, refer) for part in _NUMBERS[name][1](value))]
    return refer(value)


def unpack(data: Any, resolve: Callable[[Any], Any]) -> Any:
    """The value that `pack` gave.

    Args:
        resolve: gives the value that a list of `refer` stands for, or raises.

    Raises:
        Malformed: no such value.
    """
    try:
        return _unpack(data, resolve)
    except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from error


def _unpack(data: Any, resolve: Callable[[Any], Any]) -> Any:
    if type(data) is not list:
        if type(data) is dict:
            raise ValueError("a JSON object")
        return data
    name = data[0]
    parts = data[1:]
    if name in _TEXTS:
        if type(parts[0]) is not str:
            raise ValueError(f"no text of a {name}")
        return _TEXTS[name][2](parts[0])
    if name in _CONTAINERS:
        return _CONTAINERS[name](_unpack(part, resolve) for part in parts)
    if name == "dict":
        flat = [_unpack(part, resolve) for part in parts]
        return dict(zip(flat[::2], flat[1::2], strict=True))
    if name in _NUMBERS:
        numbers = [_unpack(part, resolve) for part in parts]
        if any(type(number) is not int for number in numbers):
            raise ValueError(f"no numbers of a {name}")
        return _NUMBERS[name][2](*numbers)
    return resolve(data)


def send(fd: int, message: Any) -> None:
    """Write a message to a pipe: JSON, or bytes as they are."""
    data = framed(message)
    while data:
        data = data[os.write(fd, data) :]


def framed(message: Any) -> memoryview:
    """A message as it is written: its length and itself."""
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return memoryview(struct.pack(">I", len(data)) + data)


def receive(fd: int, most: int = 0xFFFFFFFF, wait: Callable[[], object] = lambda: None) -> bytes:
    """Read a message of at most `most` bytes.

    Args:
        wait: called before each read; returns when there is something to read.

    Raises:
        EOFError: the other side is gone.
        Malformed: it is longer.
    """
    (length,) = struct.unpack(">I", _exactly(fd, 4, wait))
    if length > most:
        raise Malformed(f"a message of {length} bytes; {most} are read")
    return _exactly(fd, length, wait)


def parse(data: bytes) -> dict[str, Any]:
    """A message that was sent as a JSON object.

    Raises:
        Malformed: it is not one.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error
    if type(message) is not dict:
        raise Malformed("a message that is no JSON object")
    return message


def _exactly(fd: int, length: int, wait: Callable[[], object]) -> bytes:
    data = bytearray()
    while len(data) < length:
        wait()
        if not (part := os.read(fd, min(length - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)
