"""Methods of a Protocol that a class does not write: they pass their arguments, by name, to its `_call`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def forwarding(protocol: type, names: Iterable[str]) -> Callable[[C], C]:
    """Class decorator that adds the methods `names` where they are missing: `await self._call(name, **arguments)`."""

    def forward(name: str) -> Any:
        declared = getattr(protocol, name)
        signature = inspect.signature(declared)

        @functools.wraps(declared)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            _, *arguments = bound.arguments.items()
            return await self._call(name, **dict(arguments))

        return call

    def add(cls: C) -> C:
        for name in names:
            if name not in vars(cls):
                setattr(cls, name, forward(name))
        return cls

    return add
