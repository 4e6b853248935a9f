"""Replaces methods of a class and of all its subclasses, later ones too, and restores them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from agl.adapters.base import InstrumentedTracer
from agl.adapters.openai.tracer import switched_on

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""The framework's method -> agl's, which calls it."""


@dataclass(frozen=True, slots=True)
class _Patch:
    """One replaced attribute.

    Attributes:
        original: the value in the class's `__dict__`; None if it was inherited.
        replacement: the value now.
    """

    cls: Any
    name: str
    original: Any
    replacement: Any


class Patches:
    """The replaced attributes, in order."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []
        self._undo: list[Callable[[], None]] = []
        self._on = True

    def replace(self, cls: Any, name: str, replacement: Any) -> None:
        """Set `cls.name`."""
        self._patches.append(_Patch(cls, name, cls.__dict__.get(name), replacement))
        setattr(cls, name, replacement)

    def method(self, cls: Any, name: str, around: Around) -> None:
        """Replace a method where this class itself defines it."""
        original = cls.__dict__.get(name)
        if inspect.isfunction(original) and not getattr(original, "__isabstractmethod__", False):
            self.replace(cls, name, around(original))

    def also(self, undo: Callable[[], None]) -> None:
        """Call `undo` when everything is restored."""
        self._undo.append(undo)

    def tree(self, root: Any, methods: dict[str, Around], *, but: Callable[[Any], bool] = lambda cls: False) -> None:
        """Replace methods in `root`, in its subclasses and in those that are defined later.

        Args:
            methods: name -> what makes agl's method of the framework's.
            but: whether a class stays unchanged.
        """

        def patch(cls: Any) -> None:
            if self._on and not but(cls):
                for name, around in methods.items():
                    self.method(cls, name, around)

        for cls in _with_subclasses(root):
            patch(cls)
        before = root.__dict__.get("__init_subclass__")

        def init_subclass(cls: Any, **kwargs: Any) -> None:
            if before is not None:
                before.__func__(cls, **kwargs)
            else:
                super(root, cls).__init_subclass__(**kwargs)
            patch(cls)

        self.replace(root, "__init_subclass__", classmethod(init_subclass))

    def restore(self) -> None:
        """Restore everything except what another library has replaced since: agl's method stays inside it, idle."""
        self._on = False
        for undo in self._undo:
            undo()
        for patch in reversed(self._patches):
            if patch.cls.__dict__.get(patch.name) is not patch.replacement:
                continue
            if patch.original is None:
                delattr(patch.cls, patch.name)
            else:
                setattr(patch.cls, patch.name, patch.original)
        self._patches.clear()


def _with_subclasses(root: Any) -> list[Any]:
    classes = []
    queue = [root]
    while queue:
        cls = queue.pop()
        if cls not in classes:
            classes.append(cls)
            queue.extend(type.__subclasses__(cls))
    return classes


class PatchingTracer(InstrumentedTracer):
    """A tracer that replaces methods of its framework while it is on; a subclass says which in `_patch`.

    Attributes:
        with_openai: whether the spans of the framework's model calls are made by the tracer of the openai SDK.
    """

    with_openai: ClassVar[bool] = False

    def _patch(self, patches: Patches) -> None:
        raise NotImplementedError

    def _install(self) -> None:
        self._patches = Patches()
        self._patch(self._patches)
        self._openai = switched_on() if self.with_openai else None

    def _restore(self) -> None:
        self._patches.restore()
        if self._openai is not None:
            self._openai.uninstrument()
