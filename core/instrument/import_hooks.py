"""Tells when a module has been imported, so that what depends on a framework need not import it first."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Then = Callable[[str], None]
"""Called with the module's name. It must not raise."""


def when_imported(names: Sequence[str], then: Then) -> None:
    """Call `then` once for each module that is imported already or will be, in whichever thread imports it.

    Two calls never run at once, and none waits for another while a module's import lock is held: a call that finds one
    running leaves its own to it. So `then` may import what it likes.
    """
    for name in names:
        if name in sys.modules:
            _calls.append((then, name))
        else:
            _finder.watched.setdefault(name, []).append(then)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _run_calls()


_calls: deque[tuple[Then, str]] = deque()
_gate = threading.Lock()


def _run_calls() -> None:
    while _calls:
        if not _gate.acquire(blocking=False):
            return
        try:
            while _calls:
                then, name = _calls.popleft()
                then(name)
        finally:
            _gate.release()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; has what the others find for a watched name tell that it was executed."""

    def __init__(self) -> None:
        self.watched: dict[str, list[Then]] = {}

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
    """The real loader, which takes its place back before the module's code runs."""

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
        for then in _finder.watched.pop(module.__name__, ()):
            _calls.append((then, module.__name__))
        _run_calls()


_finder = _Finder()
