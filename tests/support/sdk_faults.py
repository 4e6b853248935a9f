"""Requests with one fault each, made from the types of an SDK's parameters: an unknown field or a value that the type
does not have, at every place that the type describes."""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple, Required

from typing_extensions import is_typeddict

UNKNOWN = "zzz"
"""A field that no API has, and a word."""
_DEEPEST = 6
"""Levels below a parameter: some types contain themselves."""

_SCALARS = {str: "f", int: 1, float: 1.0, bool: True, object: "f"}
_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)


class Fault(NamedTuple):
    """A value with a fault.

    Attributes:
        value: the value. sound: the same without the fault. path: where the fault is in it.
    """

    value: Any
    sound: Any
    path: tuple[str | int, ...]

    def within(self, field: str | int, wrap: typing.Callable[[Any], Any]) -> Fault:
        """The fault in a value that contains this one."""
        return Fault(wrap(self.value), wrap(self.sound), (field, *self.path))


def faults(kind: Any, depth: int = 0) -> Iterator[Fault]:
    """Every fault that a value of a type can have."""
    sound, origin = sample(kind), typing.get_origin(kind)
    if depth > _DEEPEST:
        return
    if is_typeddict(kind):
        yield Fault({**sound, UNKNOWN: 1}, sound, (UNKNOWN,))
        for field, inner in typing.get_type_hints(kind).items():
            for fault in faults(inner, depth + 1):
                yield fault.within(field, lambda value, field=field: {**sound, field: value})
    elif origin is typing.Union:
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        # A word fits a text, which the SDK allows beside the words that it knows.
        words = [member for member in members if typing.get_origin(member) is typing.Literal]
        for member in members:
            if member not in words or str not in members:
                yield from (fault for fault in faults(member, depth) if fault.path or len(members) == 1)
        if len(members) > 1 and str not in members:
            yield Fault(UNKNOWN, sound, ())
        elif len(members) > 1:
            yield Fault(7, sound, ())
    elif origin is typing.Literal:
        yield Fault(UNKNOWN if isinstance(sound, str) else {UNKNOWN: []}, sound, ())
    elif origin in _LISTS:
        yield Fault({UNKNOWN: []}, sound, ())
        for fault in faults(typing.get_args(kind)[0], depth + 1):
            yield fault.within(0, lambda value: [value])
    elif origin is dict:
        yield Fault(7, sound, ())
        for fault in faults(typing.get_args(kind)[1], depth + 1):
            yield fault.within("k", lambda value: {"k": value})
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield Fault(UNKNOWN, sound, ())
    elif kind in _SCALARS and kind is not object:
        yield Fault({UNKNOWN: []}, sound, ())


def sample(kind: Any) -> Any:
    """A small value of a type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_typeddict(kind):
        # `__required_keys__` is empty where annotations are texts.
        marked, hints = typing.get_type_hints(kind, include_extras=True), typing.get_type_hints(kind)
        needed = [field for field, hint in marked.items() if kind.__total__ or typing.get_origin(hint) is Required]
        return {field: sample(hints[field]) for field in needed}
    if origin is typing.Union:
        return sample(next(member for member in args if member is not type(None)))
    if origin is typing.Literal:
        return args[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind)).value
    if origin in _LISTS:
        return [sample(args[0])]
    if origin is dict:
        return {}
    return _SCALARS.get(kind)
