"""The lock of a directory of runs: one trainer, or one server, at a time writes there."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import IO

from agl.errors import ConfigError

log = logging.getLogger("agl")


def lock_directory(directory: Path) -> IO[str]:
    """Lock a directory until the file returned is closed, or its process ends, however it ends.

    The kernel holds the lock (`flock`), so a dead process leaves none behind; the file names who holds it.

    Raises:
        ConfigError: another holds it, of this process or another; the message names its process and host.
    """
    path = directory / "lock"
    file = path.open("a+")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{directory} is in use by {path.read_text().strip() or 'another process'}",
            hint="wait until that ends or stop it, or choose another directory",
        ) from None
    except (ImportError, OSError) as error:  # Windows, some network file systems
        log.warning("%s cannot be locked (%s): see to it that no second trainer writes there", directory, error)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
