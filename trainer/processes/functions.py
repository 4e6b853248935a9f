"""A user's function on its way to another process."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from agl.errors import ConfigError


class Portable:
    """A function that can be pickled, wherever it was written: those of scripts and notebooks travel by value, those of
    modules by name, with the search path.

    Args:
        setting: its name as an argument, for the error.
        function: any callable.

    Raises:
        ConfigError: it refers to something that cannot be sent.
    """

    def __init__(self, setting: str, function: Callable[..., Any]) -> None:
        import cloudpickle

        self.function = function
        try:
            self._pickled = cloudpickle.dumps(function)
        except Exception as error:
            raise ConfigError(
                f"{setting} {function_name(function)} cannot be sent to the policy's process: {error}",
                hint="it may refer to modules, functions and plain values, but not to open files, locks or clients",
            ) from error

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (sys.path, self._pickled)


def _arrive(path: list[str], pickled: bytes) -> Any:
    sys.path[:] = list(dict.fromkeys([*path, *sys.path]))
    return pickle.loads(pickled)


def function_name(function: Callable[..., Any]) -> str:
    """Module and name of a function, or of a callable object's class: the same in every run."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
