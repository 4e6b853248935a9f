"""Reads what a policy left in a folder, of which nothing can be expected."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path, PurePath

MAX_BYTES = 2**20
"""1 MiB: of a file that is read, unless a grader says otherwise."""


def read_text(
    path: str | os.PathLike[str],
    default: str = "",
    *,
    folder: str | os.PathLike[str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    """The text of a file that a policy may have left, for graders: `read_text(folder / "solution.py")`.

    A policy may have deleted the file, or put a folder, a link, a pipe, a device or any bytes in its place. The grader
    then gets `default` to score, instead of an exception, which would be taken for its own fault. Links are not
    followed, wherever they lead; pipes are not waited for. Needs a POSIX system.

    Args:
        path: of the file; where it is not directly in the folder, or a policy named it, give `folder`, too.
        default: the result if there is no regular file of at most `max_bytes` in the folder that can be read.
        folder: that was given to the policy; below it nothing is trusted. None: the folder that `path` names.
        max_bytes: of the file.

    Returns:
        The text, read as UTF-8 with or without a byte order mark, with a newline at the end of each line, whatever ends
        it there. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        OSError: there is no such folder, which is a mistake of the grader's.
    """
    given = Path(path)
    root = given.parent if folder is None else Path(folder)
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        inside = given.relative_to(root) if given.is_absolute() or folder is None else PurePath(given)
        *folders, name = inside.parts or ("",)
        if ".." in inside.parts:
            return default
        for part in folders:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = below
        return _read(name, directory, default, max_bytes)
    except (OSError, ValueError):
        # ValueError: a path that lies elsewhere, or that is no file's name.
        return default
    finally:
        os.close(directory)


def _read(name: str, directory: int, default: str, max_bytes: int) -> str:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=directory)
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return default
        # Its size may change meanwhile, and some files have none.
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        return default
    return io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", errors="replace").read()
