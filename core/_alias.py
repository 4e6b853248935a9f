"""Module paths under which modules that live elsewhere can be imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Alias(ModuleType):
    """A module path that forwards names to other modules, loaded on first use."""

    def __init__(self, path: str, target: str, *others: str) -> None:
        super().__init__(path, f"Another path to the names of {target}.")
        self.__path__ = []
        self._target = target
        self._others = others
        self._replaced: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        for module in map(importlib.import_module, (self._target, *self._others)):
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the target's name, so that patching a function under this path replaces it where it is used."""
        if name.startswith("_") or isinstance(value, ModuleType):
            super().__setattr__(name, value)
            return
        target = importlib.import_module(self._target)
        self._replaced.setdefault(name, getattr(target, name, None))
        setattr(target, name, value)

    def __delattr__(self, name: str) -> None:
        """Give the target its own value back: a patch of a name that is not in `__dict__` is undone by deleting it."""
        if name not in self._replaced:
            raise AttributeError(name)
        setattr(importlib.import_module(self._target), name, self._replaced.pop(name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module(self._target)(*args, **kwargs)  # type: ignore[operator]


def register(path: str, target: str, *others: str) -> None:
    """Make `target` importable as `path` as well, with the names of `others` added to it."""
    sys.modules[path] = Alias(path, target, *others)


def make_callable(module: str, function: Callable[..., Any]) -> None:
    """Let the imported `module` be called as `function`: in 0.3 a decorator and a module share a name."""

    class CallableModule(ModuleType):
        __call__ = staticmethod(function)

    sys.modules[module].__class__ = CallableModule
