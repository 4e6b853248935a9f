"""Sockets in the file system, which listen at a path of any length."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from agl.errors import ConfigError

_DESCRIPTORS = "/proc/self/fd"
"""Where Linux has a short path to each open folder: a socket's has at most 107 bytes, and TMPDIR any length."""


def listening_at(path: Path) -> socket.socket:
    """A socket that listens at a path; every user who sees the path may connect.

    Raises:
        ConfigError: there can be none.
    """
    listening = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        short = os.path.isdir(f"{_DESCRIPTORS}/{folder}")
        listening.bind(f"{_DESCRIPTORS}/{folder}/{path.name}" if short else str(path))
    except OSError as error:
        listening.close()
        length = len(os.fsencode(path))
        raise ConfigError(
            f"no socket can listen at {path}, of {length} bytes: {error}",
            hint="set TMPDIR to a folder with a short path",
        ) from error
    finally:
        os.close(folder)
    path.chmod(0o666)
    listening.listen()
    return listening
