"""Methods of clients' classes that are replaced while rollouts run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Patch:
    """One replaced method.

    Attributes:
        original: what the class itself had; None if it inherited the method.
        replacement: what it has now.
    """

    cls: Any
    name: str
    original: Any
    replacement: Callable[..., Any]


class ClientPatches:
    """The methods that are replaced now."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []

    def has(self, cls: Any, name: str) -> bool:
        """Whether the method is replaced."""
        return any(patch.cls is cls and patch.name == name for patch in self._patches)

    def replace(self, cls: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Set `cls.name`."""
        self._patches.append(_Patch(cls, name, vars(cls).get(name), replacement))
        setattr(cls, name, replacement)

    def restore(self) -> None:
        """Restore what can be restored.

        Where another library patched over a replacement, that stays inside its patch, and does nothing outside a
        rollout.
        """
        for patch in list(self._patches):
            if vars(patch.cls).get(patch.name) is not patch.replacement:
                continue
            if patch.original is None:
                delattr(patch.cls, patch.name)
            else:
                setattr(patch.cls, patch.name, patch.original)
            self._patches.remove(patch)
