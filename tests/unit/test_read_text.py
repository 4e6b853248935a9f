"""`agl.rewards.read_text` reads what a policy left, whatever it left."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import agl

READ = agl.rewards.read_text


def listen(path: Path) -> None:
    # A socket's path is short.
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


LEFT = {
    "nothing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a link out of the folder": lambda path: path.symlink_to("/etc/passwd"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe that nobody writes to": os.mkfifo,
    "a socket": listen,
    "more than the limit": lambda path: path.write_bytes(b"x" * (2**20 + 1)),
    "a sparse giant": lambda path: (path.touch(), os.truncate(path, 2**32)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_file_to_read_is_the_default(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LEFT[name](tmp_path / "solution.py")
    assert READ(tmp_path / "solution.py") == ""
    assert READ(str(tmp_path / "solution.py"), "def f(): pass") == "def f(): pass"


def test_a_file_is_its_text_and_other_bytes_are_marked(tmp_path: Path) -> None:
    file = tmp_path / "solution.py"
    file.write_text("print('ä')\n", "utf-8")
    assert READ(file) == "print('ä')\n"
    file.write_bytes(b"print('\xe4\x00')")
    assert READ(file) == "print('\ufffd\x00')"
    file.write_bytes(b"x" * 10)
    assert READ(file, max_bytes=10) == "x" * 10
    assert READ(file, max_bytes=9) == ""


def test_below_the_folder_no_link_is_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "a.py").write_text("outside")
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "a.py").write_text("inside")
    (folder / "lib").symlink_to(outside)
    assert READ(folder / "src" / "a.py", folder=folder) == "inside"
    assert READ("src/a.py", folder=folder) == "inside"
    assert READ("lib/a.py", folder=folder) == ""
    assert READ("none/a.py", folder=folder) == ""
    assert READ(folder, folder=folder) == ""


@pytest.mark.parametrize("name", ["../outside/a.py", "/etc/passwd", "/srv/a.py", "a\x00.py", "a" * 300, "", "."])
def test_a_name_that_a_policy_made_up_is_the_default(name: str, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.py").write_text("outside")
    (tmp_path / "folder").mkdir()
    assert READ(name, "none", folder=tmp_path / "folder") == "none"


@pytest.mark.parametrize("written", [b"\xef\xbb\xbfx = 1\ny = 2\n", b"x = 1\r\ny = 2\r\n", b"x = 1\ry = 2\r"])
def test_editors_of_other_systems_change_nothing(written: bytes, tmp_path: Path) -> None:
    (tmp_path / "solution.py").write_bytes(written)
    text = READ(tmp_path / "solution.py")
    assert text == "x = 1\ny = 2\n"
    assert compile(text, "solution.py", "exec")


@pytest.mark.parametrize("left", [b"", b"\x00", b"\xff\xfe", b"```", None])
def test_the_grader_of_a_page_pays_it_low(left: bytes | None, tmp_path: Path) -> None:
    if left is not None:
        (tmp_path / "solution.py").write_bytes(left)
    program = READ(tmp_path / "solution.py")
    grader = agl.rewards.PythonTests(tests="hidden", isolation="none")
    assert grader({"hidden": ["assert add(1, 2) == 3"]}, program) == 0.0


def test_a_folder_that_is_not_there_is_the_graders_mistake(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        READ(tmp_path / "copy" / "solution.py")
