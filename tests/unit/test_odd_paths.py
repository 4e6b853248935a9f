"""Paths that are no text in this system's encoding: commands say so, and none ends in a traceback."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agl.trainer.cli import main
from agl.trainer.run.hub import COMMAND_FILE, save_command

ODD = os.fsdecode(b"d\xff\xc3(ir")
LINES = [
    ["push", ODD, "name"],
    ["explain", "--list", "--store", ODD],
    ["replay", "ro", "--model", "x", "--store", ODD],
    ["train", "--model", ODD, "--tasks", ODD, "--agent", f"{ODD}.py:f"],
    ["train", "--config", ODD],
    ["export", "rollouts", "--store", ODD, "--out", ODD],
    ["runs", ODD],
    ["note", "r", "--store", ODD],
    ["stop", "r", "--store", ODD],
    ["label", "r", "1", "--store", ODD],
    ["store", "prune", "--store", ODD],
    ["trace", "ls", "--store", ODD],
    ["trace", "show", "r", "--store", ODD],
    ["runner", "--store", "http://127.0.0.1:9", "--key-file", ODD],
]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_no_command_ends_in_a_traceback(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["agl", *line])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err


def test_the_command_of_a_run_may_name_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["agl", "train", "--directory", ODD])
    save_command(tmp_path)
    assert os.fsencode(ODD) in (tmp_path / COMMAND_FILE).read_bytes()


def test_an_encoding_error_of_a_path_is_said(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object, **__: object) -> None:
        ODD.encode()

    monkeypatch.setattr(sys, "argv", ["agl", "runs", ODD])
    monkeypatch.setattr("agl.trainer.cli.runs.list_runs", fails)
    with pytest.raises(SystemExit, match="a path is not in this system's encoding"):
        main()
