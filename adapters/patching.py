"""Methods replaced in a class and in all its subclasses, those to come too, and put back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes our method of the framework's."""


@dataclass(frozen=True, slots=True)
class _Replaced:
    cls: Any
    name: str
    original: Any
    """What the class's own namespace held; None: it was inherited."""
    ours: Any


class Patches:
    """What was replaced so far, in order."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []
        self._on = True

    def replace(self, cls: Any, name: str, ours: Any) -> None:
        """Set `cls.name`."""
        self._replaced.append(_Replaced(cls, name, cls.__dict__.get(name), ours))
        setattr(cls, name, ours)

    def method(self, cls: Any, name: str, around: Around) -> None:
        """Replace a method where this class itself defines it."""
        original = cls.__dict__.get(name)
        if inspect.isfunction(original) and not getattr(original, "__isabstractmethod__", False):
            self.replace(cls, name, around(original))

    def tree(self, root: Any, methods: dict[str, Around], *, but: Callable[[Any], bool] = lambda cls: False) -> None:
        """Replace methods in `root`, in its subclasses and in those that are defined later.

        Args:
            methods: name -> our method, made of the framework's.
            but: classes that are left as they are.
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
        """Put everything back, but what another library has replaced since: there ours stays inside, idle."""
        self._on = False
        for done in reversed(self._replaced):
            if done.cls.__dict__.get(done.name) is not done.ours:
                continue
            if done.original is None:
                delattr(done.cls, done.name)
            else:
                setattr(done.cls, done.name, done.original)
        self._replaced.clear()


def _with_subclasses(root: Any) -> list[Any]:
    found, ahead = [], [root]
    while ahead:
        cls = ahead.pop()
        if cls not in found:
            found.append(cls)
            ahead.extend(type.__subclasses__(cls))
    return found
