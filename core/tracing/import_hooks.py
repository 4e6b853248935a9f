"""Calls functions when a module has been imported, so that an adapter need not import its framework first."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[str], Any]
"""Called with the module's name; must not raise."""


def when_imported(names: Sequence[str], callback: Callback) -> Callable[[], None]:
    """Call `callback` once for each module that is or will be imported, in the thread that imports it.

    Two callbacks never run at the same time, and none waits for another while a module's import lock is held: a thread
    that finds a callback running leaves its own to that thread. So a callback may import anything.

    Returns:
        A function after which the modules that were not imported yet are not watched any more.
    """
    for name in names:
        if name in sys.modules:
            _calls.append((callback, name))
        else:
            _finder.watched.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _run_calls()

    def forget() -> None:
        for name in names:
            callbacks = _finder.watched.get(name, [])
            if callback in callbacks:
                callbacks.remove(callback)

    return forget


_calls: deque[tuple[Callback, str]] = deque()
_gate = threading.Lock()


def _run_calls() -> None:
    while _calls:
        if not _gate.acquire(blocking=False):
            return
        try:
            while _calls:
                callback, name = _calls.popleft()
                callback(name)
        finally:
            _gate.release()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps the loader that another finder returns for a watched module."""

    def __init__(self) -> None:
        self.watched: dict[str, list[Callback]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.watched:
            return None
        for finder in sys.meta_path:
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Wraps the real loader, and puts it back before the module's code runs."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for callback in _finder.watched.pop(module.__name__, ()):
            _calls.append((callback, module.__name__))
        _run_calls()


_finder = _Finder()
