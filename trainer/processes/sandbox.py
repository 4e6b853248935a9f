"""Walls around a child process that runs what nobody trusts: one interface, with bubblewrap or a container behind it.

A sandbox starts a command whose standard streams are pipes. Every command has walls of its own: what one leaves behind,
another never sees.
"""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, kw_only=True)
class Walls:
    """What a command may use of the machine.

    Attributes:
        folders: what it can read besides the system's programs and libraries: path inside -> path here.
        environment: its variables, none else.
        scratch_mb: MiB that it may write to /tmp, and to /dev/shm.
        memory_mb, processes: MiB of memory of all its processes; the number of these and their threads. Containers
            enforce both. bubblewrap has no control groups, so its command has to: `graders.programs.inside.supervisor`.
    """

    folders: Mapping[str, str]
    environment: Mapping[str, str]
    memory_mb: int
    scratch_mb: int
    processes: int


class Sandbox(ABC):
    """A way to start a command behind walls.

    Attributes:
        name: as in `PythonTests(isolation=name)`.
        python: the interpreter inside; None if the programs of this machine can be used.
        mounts: whether `Walls.folders` are seen at their paths inside.
    """

    name: str
    python: str | None = None
    mounts: bool = True

    @abstractmethod
    def problem(self) -> str | None:
        """Why it cannot be used here, and what to do about it; None if a command could be run in it."""

    @abstractmethod
    def start(self, command: Sequence[str], walls: Walls) -> subprocess.Popen[bytes]:
        """Start a command with pipes as its standard streams. To end it and all that it has started, kill the process.

        Call it from a thread that lives as long as the command may: the kernel takes the end of the thread for the end
        of its process.

        Raises:
            OSError: the program that makes the walls cannot be started. Walls that cannot be made, or are lost
                later, are reported on standard error.
        """


def piped(
    command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = (), cwd: str | None = None
) -> subprocess.Popen[bytes]:
    """A process with unbuffered pipes, and no signals from this one's terminal."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=dict(environment),
        pass_fds=pass_fds,
        cwd=cwd,
        start_new_session=True,
    )


def tried(command: Sequence[str], pass_fds: Sequence[int] = (), seconds: float = 60.0) -> str | None:
    """The last line of a command's error; None if it ended well."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, pass_fds=pass_fds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.decode(errors="replace").split("\n")
    texts = [line.strip() for line in lines if line.strip()]
    return None if done.returncode == 0 else texts[-1] if texts else f"it exited with {done.returncode}"
