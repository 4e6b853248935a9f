"""How options are checked before anything uses them: their names, and the types of their values."""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar

from agl.errors import ConfigError, nearest

T = TypeVar("T", bound=type)


def reject_unknown(
    options: Iterable[str],
    known: Iterable[str],
    what: str,
    owners: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise `ConfigError` for the first of `options` that is not in `known`; `what` has them.

    Args:
        owners: names of other objects' options -> whose they are.
    """
    names = set(known)
    for word in options:
        if word not in names:
            hint = f"give it to {owners[word]}" if word in owners else nearest(word, names)
            raise ConfigError(f"{what} has no option {word!r}", hint=hint)


def require_types(options: Mapping[str, Any], cls: type) -> None:
    """Raise `ConfigError` for the first option that is not of the type of this dataclass's field.

    Checked are fields of numbers, texts, paths, tuples of these and dataclasses; what else may be is not.
    """
    hints = _hints(cls)
    for name, value in options.items():
        if name in hints and not _fits(value, hints[name]):
            raise ConfigError(f"{name} is {value!r}", hint=f"use {_described(hints[name])}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


_PLAIN: Mapping[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    NoneType: (NoneType, "None"),
    Path: (Path, "a path"),
}
"""Types -> what values of them are instances of, and their description."""


def _fits(value: Any, kind: Any) -> bool:
    parts = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if typing.get_origin(kind) is typing.Literal:
        # Which texts are known is checked where they are used, with what else may stand there.
        return not isinstance(value, int | float | None) or value in parts
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple | list) or (Ellipsis not in parts and len(value) != len(parts)):
            return False
        return all(map(_fits, value, itertools.repeat(parts[0]) if Ellipsis in parts else parts))
    if kind in _PLAIN:
        return isinstance(value, _PLAIN[kind][0]) and (kind is bool or not isinstance(value, bool))
    return not is_dataclass(kind) or isinstance(value, kind)  # type: ignore[arg-type]


def _described(kind: Any) -> str:
    parts = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return " or ".join(map(_described, parts))
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(map(repr, parts))
    if typing.get_origin(kind) is tuple:
        return f"a tuple ({', '.join('...' if part is Ellipsis else _described(part) for part in parts)})"
    return _PLAIN[kind][1] if kind in _PLAIN else getattr(kind, "written", f"agl.{kind.__name__}(...)")


def checked_options(cls: T) -> T:
    """Class decorator of a dataclass: an unknown keyword argument is a `ConfigError` with the nearest name, not a
    `TypeError`; so is a value that `require_types` refuses."""
    original: Callable[..., None] = cls.__init__
    known = [name for name in inspect.signature(original).parameters if name != "self"]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        reject_unknown(kwargs, known, cls.__name__)
        require_types(dict(zip(known, args, strict=False)) | kwargs, cls)
        original(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls
