"""Reads what a policy left in a folder, of which nothing can be expected."""

from __future__ import annotations

import io
import logging
import os
import stat
from pathlib import PurePath

log = logging.getLogger("agl")
MAX_BYTES = 2**20
"""1 MiB: of a file that is read, unless a grader says otherwise."""
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""Linux needs no permission to list a folder for what is opened in it."""
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_text(
    path: str | bytes | os.PathLike[str],
    default: str = "",
    *,
    folder: str | bytes | os.PathLike[str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    """The text of a file that a policy may have left, for graders: `read_text(folder / "solution.py")`.

    A policy may have deleted the file or its folder, put a folder, a link, a pipe, a device or any bytes in its place,
    or named what is no file. The grader then gets `default` to score, instead of an exception, which would be taken for
    its own fault. Pipes are not waited for. Links are not followed, but for those above `folder`; without `folder`, for
    those that the system has: in the root of the file system, or made by root, if this process is not. A missing folder
    of the grader's, and a link above the file, are logged. Needs a POSIX system.

    Args:
        path: of the file.
        default: the result if no regular file of at most `max_bytes` can be read there.
        folder: that was given to the policy; nothing outside is read. Needed where you yourself made a link above it.
        max_bytes: of the file.

    Returns:
        The text, read as UTF-8 with or without a byte order mark, with a newline at the end of each line, whatever ends
        it there. Bytes that are not UTF-8 become U+FFFD.
    """
    try:
        # Names that a policy made up may be no texts.
        file = PurePath(os.fsdecode(path))
        root = None if folder is None else PurePath(os.fsdecode(folder))
        if root is not None and file.is_absolute():
            file = file.relative_to(root)
        if ".." in file.parts and root is not None:
            return default
        start = root or PurePath(file.anchor or ".")
        *folders, name = file.relative_to(file.anchor).parts or ("",)
        directory = _open_root(start)
        try:
            for part in folders:
                below = _open_folder(part, directory, None if root else file)
                os.close(directory)
                directory = below
            content = _read(name, directory, max_bytes)
        finally:
            os.close(directory)
    except (OSError, ValueError, TypeError):
        # ValueError: a path that lies elsewhere, or that is no file's name. TypeError: no path at all.
        return default
    return default if content is None else io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", errors="replace").read()


def _open_root(root: PurePath) -> int:
    """Open the folder that a grader names.

    Raises:
        OSError: there is no such folder, which is logged.
    """
    try:
        return os.open(root, _FOLDER)
    except OSError:
        log.warning("nothing is read in %s: there is no such folder; the policy removed it, or you misspelled it", root)
        raise


def _open_folder(name: str, directory: int, path: PurePath | None) -> int:
    """Open a folder in `directory`, but no link, or one of the system's on a grader's own `path`.

    Raises:
        OSError: there is no such folder, or it is another link. On a grader's `path` this is logged.
    """
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=directory)
    except OSError as error:
        if path is None:
            raise
        if isinstance(error, FileNotFoundError):
            log.warning(
                "%s is not read: there is no folder %r; the policy removed it, or you misspelled it", path, name
            )
            raise
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode):
            raise
        in_root = os.path.samestat(os.fstat(directory), os.stat("/"))
        if in_root or found.st_uid == 0 != os.geteuid():
            return os.open(name, _FOLDER, dir_fd=directory)
        log.warning(
            "%s is not read: %r is a link, which the policy may have made; if you made it, name the folder that the "
            "policy was given: read_text(path, folder=...)",
            path,
            name,
        )
        raise


def _read(name: str, directory: int, max_bytes: int) -> bytes | None:
    """The bytes of a file in `directory`; None if it is no regular file, or has more than `max_bytes`.

    Raises:
        OSError: it cannot be opened or read.
        ValueError: it is no file's name.
    """
    file = os.open(name, _FILE, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        # Its size may change meanwhile, and some files have none.
        content = b""
        while len(content) <= max_bytes and (piece := os.read(file, max_bytes + 1 - len(content))):
            content += piece
    finally:
        os.close(file)
    return content if len(content) <= max_bytes else None
