"""Import hooks: called once, after the module's code ran, in any thread, and the module is unchanged otherwise."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from pathlib import Path

import pytest

from agl.tracing.import_hooks import when_imported


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_told_once_after_its_code(folder: Path) -> None:
    (folder / "agl_told.py").write_text("value = 1\n")
    seen: list[int] = []
    when_imported(("agl_told",), lambda name: seen.append(sys.modules[name].value))
    assert seen == []
    module = importlib.import_module("agl_told")
    importlib.import_module("agl_told")
    assert seen == [1]
    assert inspect.getsource(module) == "value = 1\n"
    assert type(module.__loader__).__module__.startswith(("importlib", "_frozen"))
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    when_imported(("agl_told",), lambda name: seen.append(2))
    assert seen == [1, 2], "at once for what is there already"


def test_a_module_that_fails_is_not_told(folder: Path) -> None:
    (folder / "agl_fails.py").write_text("raise ImportError('broken')\n")
    seen: list[str] = []
    when_imported(("agl_fails",), seen.append)
    with pytest.raises(ImportError, match="broken"):
        importlib.import_module("agl_fails")
    assert seen == []


def test_imports_in_two_threads_and_in_the_call_do_not_wait_for_each_other(folder: Path) -> None:
    """The call for `left` imports `right`, while another thread holds `right`'s import lock and wants its own call."""
    (folder / "agl_left.py").write_text("")
    (folder / "agl_right.py").write_text("import agl_gate\nagl_gate.entered.set()\nagl_gate.go.wait(10)\n")
    (folder / "agl_gate.py").write_text("import threading\nentered, go = threading.Event(), threading.Event()\n")
    gate = importlib.import_module("agl_gate")
    told: list[str] = []

    def then(name: str) -> None:
        if name == "agl_left":
            gate.go.set()
            importlib.import_module("agl_right")
        told.append(name)

    when_imported(("agl_left", "agl_right"), then)
    other = threading.Thread(target=importlib.import_module, args=("agl_right",), daemon=True)
    other.start()
    assert gate.entered.wait(10)
    importlib.import_module("agl_left")
    other.join(10)
    assert not other.is_alive()
    assert sorted(told) == ["agl_left", "agl_right"]
