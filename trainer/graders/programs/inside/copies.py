"""Copies of what a policy has left in folders: an archive that travels in messages, and files again at its end. Only
the standard library.

Invariants: an archive has folders, regular files, and links that lead where its reader allows, whatever else there is.
Nothing is followed or waited for, and nobody holds all of it in memory. What could not be laid out on another machine
is refused before the first byte: it is the failure of who left it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import dropwhile
from pathlib import PurePosixPath
from typing import Any

from agl.trainer.graders.programs.inside import plain

MOST_FILES = 10_000
"""Of files, folders and all else that is left."""
MOST_PATH_BYTES = 1024
MOST_DEPTH = 100
"""Of a path below the folder that is copied, so that it fits below another one, too."""

_HEADER_BYTES = 8 << 10
"""What an archive has at most for an entry beside its bytes: its path, its link's target, and what fills blocks."""
_LATEST = 0o77777777777
"""Seconds since 1970 that a plain header can have."""
_PART = 1 << 16
_UNFIT = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""Errors of a name that one file system has and another cannot have."""


class Refused(Exception):
    """What was left cannot be copied: the failure of who left it."""


def found(base: str, tops: Sequence[str], most_bytes: int, links: Sequence[str] = ()) -> list[tarfile.TarInfo]:
    """What is to be copied: folders before what is in them, links last. Call it when nothing that may write there runs.

    Args:
        base: the folder that paths are relative to.
        tops: the entries of it that are copied, of any kind.
        links: where links may lead, as paths without links; other ones do not come along, as pipes, sockets and devices
            do not.

    Raises:
        Refused: there is too much, or a path is too long.
        OSError: it cannot be read.
    """
    entries = list[tarfile.TarInfo]()
    linked = list[tarfile.TarInfo]()
    waiting = [top for top in tops if os.path.lexists(os.path.join(base, top))]
    seen = 0
    while waiting:
        if seen + len(waiting) > MOST_FILES:
            raise Refused(f"more than {MOST_FILES} files")
        name = waiting.pop()
        seen += 1
        size = len(os.fsencode(name))
        depth = name.count("/")
        if size > MOST_PATH_BYTES or depth > MOST_DEPTH:
            raise Refused(f"a path of {size} bytes in {depth} folders; {MOST_PATH_BYTES} and {MOST_DEPTH} can be kept")
        path = os.path.join(base, name)
        facts = os.lstat(path)
        entry = tarfile.TarInfo(name)
        entry.mode = stat.S_IMODE(facts.st_mode)
        entry.mtime = max(0, min(int(facts.st_mtime), _LATEST))
        if stat.S_ISDIR(facts.st_mode):
            entry.type = tarfile.DIRTYPE
            entries.append(entry)
            os.chmod(path, entry.mode | stat.S_IRWXU)  # its owner may have closed it
            waiting += [f"{name}/{below}" for below in os.listdir(path)]
        elif stat.S_ISREG(facts.st_mode):
            entry.size = facts.st_size
            most_bytes -= entry.size
            if most_bytes < 0:
                raise Refused("more bytes than the disk has")
            entries.append(entry)
            os.chmod(path, entry.mode | stat.S_IRUSR)
        elif stat.S_ISLNK(facts.st_mode) and _leads_to(path, links):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
            linked.append(entry)
    return entries + linked


def _leads_to(link: str, folders: Sequence[str]) -> bool:
    """Whether a link leads into one of these folders, and can't lead elsewhere where there are other files.

    Decided by its text alone, in which ".." comes first or not at all: after a part that may be a link it would lead
    out of a folder that the text does not name.
    """
    target = os.readlink(link)
    if ".." in dropwhile(lambda part: part in ("/", ".."), PurePosixPath(target).parts):
        return False
    place = PurePosixPath(os.path.normpath(os.path.join(os.path.dirname(link), target)))
    return any(place.is_relative_to(folder) for folder in folders)


def send(fd: int, base: str, entries: Iterable[tarfile.TarInfo]) -> None:
    """Write an archive of what was found, in messages of which the last one is empty.

    Raises:
        OSError: it cannot be read, or nobody reads the messages.
    """
    target: Any = _Writer(fd)
    with tarfile.open(mode="w|", fileobj=target, bufsize=_PART, format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
        for entry in entries:
            if not entry.isreg():
                archive.addfile(entry)
                continue
            path = os.path.join(base, entry.name)
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                archive.addfile(entry, file)
    plain.send(fd, b"")


class _Writer:
    """Writes messages."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> int:
        plain.send(self._fd, bytes(data))
        return len(data)


def parts(fd: int, most_bytes: int) -> Iterator[bytes]:
    """The messages of an archive, without the last one.

    Args:
        most_bytes: what `found` was given.

    Raises:
        EOFError: the other side is gone.
        plain.Malformed: they are larger, together, than that of any files that were found.
    """
    left = most_bytes + MOST_FILES * _HEADER_BYTES + (1 << 20)
    while part := plain.receive(fd, 1 << 20):
        left -= len(part)
        if left < 0:
            raise plain.Malformed("an archive that is too large")
        yield part


def lay_out(archive: Iterator[bytes], folder: str, *, exact: bool = False) -> None:
    """Make files below a folder, in which there is none of them, from the messages of an archive.

    Args:
        exact: whether empty folders, links and modes come along, which only a reader behind walls of its own may have;
            else regular files alone, that their owner can read and write.

    Raises:
        Refused: this machine cannot have such a name.
        plain.Malformed: it is no such archive.
        OSError: it cannot be written.
    """
    source: Any = _Reader(archive)
    folders = list[tuple[str, int]]()
    try:
        with tarfile.open(mode="r|", fileobj=source, bufsize=_PART, encoding="utf-8") as tar:
            for entry in tar:
                if entry.name.startswith("/") or ".." in entry.name.split("/"):
                    raise plain.Malformed(f"an archive with {entry.name!r}")
                path = os.path.join(folder, entry.name)
                if entry.isreg():
                    _write(path, tar, entry, entry.mode if exact else entry.mode & 0o755 | 0o600)
                elif exact and entry.isdir():
                    os.makedirs(path, exist_ok=True)
                    folders.append((path, entry.mode))
                elif exact and entry.issym():
                    os.symlink(entry.linkname, path)
    except UnicodeEncodeError as error:
        raise Refused(f"a file that cannot be kept here: {error}") from error
    except tarfile.TarError as error:
        raise plain.Malformed(f"{type(error).__name__}: {error}") from error
    except OSError as error:
        if error.errno in _UNFIT:
            raise Refused(f"a file that cannot be kept here: {error.strerror}") from error
        raise
    for path, mode in reversed(folders):  # nothing may be written to some of them
        os.chmod(path, mode)
    for _ in archive:  # what fills its last block
        pass


def _write(path: str, tar: tarfile.TarFile, entry: tarfile.TarInfo, mode: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    content = tar.extractfile(entry)
    assert content
    with (
        content,
        open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC), "wb") as file,
    ):
        shutil.copyfileobj(content, file, _PART)
        os.fchmod(file.fileno(), mode)
        os.utime(file.fileno(), (entry.mtime, entry.mtime))


class _Reader:
    """A file of the bytes of messages."""

    def __init__(self, archive: Iterator[bytes]) -> None:
        self._archive = archive

    def read(self, size: int) -> bytes:
        """The next message, of whatever size, as a stream of tarfile's takes it."""
        return next(self._archive, b"")
