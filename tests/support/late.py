"""Frameworks that test files name at their top, and that are imported when a test first uses them."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.machinery import PathFinder
from typing import Any

import pytest


def installed(module: str) -> bool:
    """Whether a module can be imported. Imports nothing, not even the package that the module is in."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    for name in inner:
        package = f"{package}.{name}"
        spec = spec and PathFinder.find_spec(package, spec.submodule_search_locations)
    return spec is not None


class Late:
    """A module that is imported at the first use of one of its attributes, so that collecting tests stays quick.

    Skips the test file where the module is not installed.
    """

    def __init__(self, name: str) -> None:
        if not installed(name):
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # what pytest asks of everything in a test file
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
