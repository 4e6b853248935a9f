"""What an installation holds: every package of the tree, and entry points that load."""

from __future__ import annotations

import subprocess
from importlib.metadata import entry_points

from paths import ROOT

FOLDERS = ("core", "adapters", "trainer")


def test_every_folder_of_modules_is_a_package() -> None:
    """setuptools finds packages, and leaves a folder without an `__init__.py` out of the wheel."""
    folders = {file.parent for name in FOLDERS for file in (ROOT / name).rglob("*.py")}
    assert [f for f in folders if not (f / "__init__.py").is_file()] == []


def test_imports_only_run_down() -> None:
    done = subprocess.run(["lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


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
