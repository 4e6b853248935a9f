"""`agl.rewards.read_text` reads what a policy left, whatever it left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("named", ["by the path", "by the argument"])
def test_a_folder_that_was_removed_is_the_default_and_logged(
    named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy can have removed it, and a grader can have misspelled it."""
    folder = tmp_path / "work"
    options: Any = {"folder": folder} if named == "by the argument" else {}
    assert READ(folder / "solution.py", "none", **options) == "none"
    assert "there is no" in caplog.text
    assert "work" in caplog.text


def outside_and_inside(tmp_path: Path) -> Path:
    """A folder outside with the file that a policy wants, and the policy's."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "solution.py").write_text("outside")
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def the_folder_itself(work: Path) -> Path:
    work.rmdir()
    work.symlink_to(work.parent / "outside")
    return work


def a_folder_in_it(work: Path) -> Path:
    (work / "src").symlink_to("../outside")
    return work / "src"


def a_folder_above_the_files(work: Path) -> Path:
    (work / "a").symlink_to(work.parent)
    return work / "a" / "outside"


def a_link_in_a_folder_that_is_made_read_only(work: Path) -> Path:
    (work / "src").mkdir()
    (work / "src" / "a").symlink_to(work.parent / "outside")
    (work / "src").chmod(0o500)
    return work / "src" / "a"


LINKS = [the_folder_itself, a_folder_in_it, a_folder_above_the_files, a_link_in_a_folder_that_is_made_read_only]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("relative", [False, True])
def test_a_path_with_a_folder_that_became_a_link_is_not_read(
    link: Callable[[Path], Path],
    relative: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = link(outside_and_inside(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = (folder.relative_to(tmp_path) if relative else folder) / "solution.py"
    assert path.read_text() == "outside"
    assert READ(path) == ""
    assert "read_text(path, folder=...)" in caplog.text


def test_a_link_of_the_graders_is_followed_above_the_folder_that_it_names(tmp_path: Path) -> None:
    work = outside_and_inside(tmp_path)
    (work / "solution.py").write_text("inside")
    (tmp_path / "short").symlink_to(work)
    assert READ(tmp_path / "short" / "solution.py", folder=tmp_path / "short") == "inside"
    assert READ("solution.py", folder=tmp_path / "short") == "inside"


@pytest.mark.parametrize(
    "name",
    [b"../outside/solution.py", b"\xff.py", b"a\x00.py", "\ud800.py", None, 7, ["solution.py"], 1.5, object()],
)
@pytest.mark.parametrize("in_folder", [True, False])
def test_a_name_that_is_no_text_is_the_default(
    name: Any, in_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = outside_and_inside(tmp_path)
    monkeypatch.chdir(work)
    if in_folder:
        assert READ(name, "none", folder=work) == "none"
    else:
        assert READ(name, "none") in ("none", "outside")


def test_a_name_in_bytes_is_the_files(tmp_path: Path) -> None:
    (tmp_path / "ä.py").write_text("inside")
    assert READ("ä.py".encode(), folder=os.fsencode(tmp_path)) == "inside"


def test_a_file_that_grows_while_it_is_read_is_the_default(tmp_path: Path) -> None:
    """What is written to it is more than what is read of it."""
    file = tmp_path / "solution.py"
    file.touch()
    over = threading.Event()

    def grow() -> None:
        with file.open("ab") as opened:
            while not over.is_set() and opened.tell() < 2**26:
                opened.write(b"x" * 2**16)
                opened.flush()

    growing = threading.Thread(target=grow)
    growing.start()
    try:
        while file.stat().st_size < 1000:
            pass
        assert READ(file, max_bytes=100) == ""
    finally:
        over.set()
        growing.join()


def test_no_file_stays_open(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    os.mkfifo(tmp_path / "a pipe")
    (tmp_path / "a link").symlink_to("/")
    (tmp_path / "a file").write_text("x")
    before = len(os.listdir("/dev/fd"))
    for name in ("a folder", "a pipe", "a link", "a file", "a link/etc", "a folder/x", "none/x"):
        READ(tmp_path / name)
        READ(name, folder=tmp_path)
    assert len(os.listdir("/dev/fd")) == before


def test_the_working_directory_does_not_matter_for_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = outside_and_inside(tmp_path)
    (work / "solution.py").write_text("inside")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert READ(work / "solution.py") == "inside"
    assert READ("solution.py", folder=work) == "inside"
    assert READ("solution.py", "none") == "none"


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="without it, the folders above must be listed")
def test_folders_above_that_cannot_be_listed_are_passed() -> None:
    """As the home directories of other users, of mode 711."""
    program = (
        "import os, sys\n"
        "from agl.rewards.files import read_text\n"
        "read_text(os.__file__)  # imports what this needs\n"
        "os.chdir(sys.argv[2])\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "print(read_text(sys.argv[1]), end='')"
    )
    with tempfile.TemporaryDirectory() as home:
        work = outside_and_inside(Path(home))
        (work / "solution.py").write_text("inside")
        # The working directory, too, is another user's.
        private = Path(home) / "private"
        private.mkdir(mode=0o700)
        Path(home).chmod(0o311)
        command = [sys.executable, "-c", program, work / "solution.py", private]
        done = subprocess.run(command, capture_output=True, text=True)
        Path(home).chmod(0o700)
    assert done.stdout == "inside", done.stderr
