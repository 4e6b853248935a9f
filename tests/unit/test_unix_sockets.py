"""Sockets in the file system: whoever sees the path connects, however long it is."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from agl.errors import ConfigError
from agl.trainer.http import unix_sockets
from agl.trainer.http.unix_sockets import listening_at


def long_folder(path: Path) -> Path:
    folder = path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a short path to an open folder")
def test_a_path_may_have_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR of a job on a cluster: a harness's attempts ended in a bare `OSError: AF_UNIX path too long`."""
    folder = long_folder(tmp_path)
    with listening_at(folder / "socket") as listening, socket.socket(socket.AF_UNIX) as client:
        assert (folder / "socket").stat().st_mode & 0o777 == 0o666
        monkeypatch.chdir(folder)
        client.connect("socket")
        accepted, _ = listening.accept()
        with accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"


def test_one_that_is_too_long_elsewhere_is_an_error_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "_DESCRIPTORS", "/nowhere")
    with pytest.raises(ConfigError, match=r"of \d+ bytes.*\n.*set TMPDIR"):
        listening_at(long_folder(tmp_path) / "socket")
    with listening_at(tmp_path / "s"):
        assert (tmp_path / "s").is_socket()
