"""What an installation holds: every package of the tree, and entry points that load."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"core": "agl", "adapters": "agl.adapters", "trainer": "agl.trainer"}


def test_every_package_is_listed() -> None:
    """setuptools is given the packages by name, so a new folder must be added to the list."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join((name, *file.parent.relative_to(ROOT / folder).parts))
        for folder, name in FOLDERS.items()
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert set(listed) == found


@pytest.mark.parametrize("group", ["agl.adapters", "opentelemetry_instrumentor"])
def test_entry_points_load(group: str) -> None:
    ours = [e for e in entry_points(group=group) if e.value.startswith("agl.")]
    assert ours
    for entry in ours:
        tracer = entry.load()
        assert callable(tracer.handles)
        assert callable(tracer().instrument)
