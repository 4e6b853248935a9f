"""Packages that load their names on first use, so importing them stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`.
        names: module -> the names that it holds; "" for submodules of `package`.

    A name whose module needs an extra that is not installed raises `agl.errors.MissingExtraError`.
    """
    home = {name: module for module, held in names.items() for name in held}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not home[name]:
            return importlib.import_module(f"{package}.{name}")
        try:
            value = getattr(importlib.import_module(home[name]), name)
        except ModuleNotFoundError as error:
            from agl.extras import explained

            if (clear := explained(f"{package}.{name}", error)) is None:
                raise
            raise clear from error
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return load, directory, sorted(home)
