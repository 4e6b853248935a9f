"""What an installation holds: every package of the tree, and entry points that load."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

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


def test_adapters_load() -> None:
    ours = [e for e in entry_points(group="agl.adapters") if e.value.startswith("agl.")]
    assert ours
    for entry in ours:
        tracer = entry.load()
        assert callable(tracer.handles)
        assert callable(tracer().instrument)
        assert tracer.modules, "or a program that is traced without code never gets it"


def test_one_instrumentor_switches_them_on() -> None:
    (entry,) = [e for e in entry_points(group="opentelemetry_instrumentor") if e.value.startswith("agl.")]
    assert callable(entry.load()().instrument)
