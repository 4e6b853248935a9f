"""The first process of a sandbox: it forks what each job runs, measures it, and kills all that it has started.

A job comes on standard input, and how it ended goes to standard error. Standard input and output otherwise belong to
what the job runs. As the first process of its namespace it cannot be killed or stopped from within.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agl.trainer.graders.programs.inside import judge, plain, program

READY = b"ready\n"
MOST_FILES = 10_000
"""Files and folders of a program: each takes memory of the kernel's, which no other limit counts."""

_HOME = "/tmp/home"
_POLL_MS = 20
_SCRATCH = ("/tmp", "/dev/shm")
_ERROR_BYTES = 1 << 13
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    """Run jobs until standard input ends. The argument is a uid to become if this is root."""
    begin(int(sys.argv[1]))
    reports = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    kept = _scratch()
    os.write(reports, READY)
    with contextlib.suppress(EOFError, BrokenPipeError, plain.Malformed):
        while True:
            job = plain.parse(plain.receive(0))
            plain.send(reports, _run(job, reports, kept))


def begin(uid: int) -> None:
    """Give up root for this uid, adopt what is left behind, and hide this process."""
    if os.getpid() == 1 and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)  # forgotten with the old uid
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    _keep_spare()
    # No process of this user may open this one's memory and descriptors.
    _control(_PR_SET_DUMPABLE, 0)


def _run(job: dict[str, Any], reports: int, kept: set[str]) -> dict[str, Any]:
    """How a job ended: {"status"} of its process or the {"reason"} why it was killed, and the "error" that it wrote.

    "clean" says whether the next job finds nothing of this one.
    """
    folder = _HOME if os.getpid() == 1 else _new_folder()
    os.makedirs(folder, exist_ok=True)
    errors, error_writer = os.pipe()
    os.set_blocking(errors, False)
    ended = watched(lambda: _enter(job, folder, error_writer), job)
    os.close(error_writer)
    with contextlib.suppress(OSError):
        ended["error"] = os.read(errors, _ERROR_BYTES).decode(errors="replace")
    os.close(errors)
    return ended | {"clean": _tidy(folder, kept)}


def watched(
    enter: Callable[[], object], job: Mapping[str, Any], exceeded: Callable[[], str | None] = lambda: None
) -> dict[str, Any]:
    """Run `enter` in a fork, until it ends or exceeds a limit: {"status"}, or the {"reason"} why all that it has
    started was killed.

    Args:
        exceeded: the reason why it is to be killed, of limits besides the job's.
    """
    bell, ring = os.pipe()
    os.set_blocking(ring, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            enter()
        finally:
            os._exit(1)
    ended = _watch(pid, bell, job, exceeded)
    signal.set_wakeup_fd(-1)
    _end_all(pid)
    os.close(bell)
    os.close(ring)
    return ended


def _new_folder() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="agl-tests-")


def _watch(pid: int, bell: int, job: Mapping[str, Any], exceeded: Callable[[], str | None]) -> dict[str, Any]:
    events = select.poll()
    events.register(bell, select.POLLIN)
    events.register(0, 0)  # its end alone
    deadline = time.monotonic() + job["seconds"]
    alone = os.getpid() == 1
    while True:
        happened = events.poll(job.get("poll_ms", _POLL_MS if alone else 10 * _POLL_MS))
        if any(fd == bell for fd, _ in happened):
            os.read(bell, 1 << 12)
        # Processes whose parents have ended are children of the first one.
        while (ended := os.waitpid(-1 if alone else pid, os.WNOHANG))[0]:
            if ended[0] == pid:
                return {"status": ended[1]}
        if any(fd == 0 for fd, _ in happened):
            return {"reason": "given up"}
        if time.monotonic() > deadline:
            return {"reason": "ran out of time"}
        try:
            used_mb = _resident_mb()
        except OSError:
            # Nothing holds it to its limit any more.
            return {"reason": "used memory that could not be measured"}
        if used_mb > job["memory_mb"]:
            return {"reason": "used too much memory"}
        if alone and sum((found := os.statvfs(path)).f_files - found.f_ffree for path in _SCRATCH) > MOST_FILES:
            return {"reason": "made too many files"}
        if reason := exceeded():
            return {"reason": reason}


def _enter(job: dict[str, Any], folder: str, errors: int) -> None:
    """In the fork: give up what the job is not to have, and run it."""
    os.chdir(folder)
    confine(job)
    os.environ.update(HOME=folder, TMPDIR=folder)
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (0, 1, errors)]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if job["kind"] == "stdin":
        with open("stdin", "w", encoding="utf-8", errors="replace") as file:
            file.write(job["input"])
        os.dup2(os.open("stdin", os.O_RDONLY), 0)
        os.unlink("stdin")
    else:
        os.dup2(2, 1)
    for number, fd in enumerate(ends, 3):
        os.dup2(fd, number)
    os.closerange(6, 1 << 10)
    del sys.path[0]  # where this module was found
    if job["kind"] == "test":
        _control(_PR_SET_DUMPABLE, 0)
        judge.run(3, 4, job)
    program.run(3, 4, 5, job)


def confine(job: Mapping[str, Any]) -> None:
    """Set the job's limits on this process, which leads a session of its own and gains no rights any more."""
    os.setsid()
    seconds = job["cpu_seconds"]
    size = job["file_mb"] << 20
    # What reserves addresses that it never uses, as V8 does, is limited by what it uses alone.
    memory = job.get("address_bytes", job["memory_mb"] << 20)
    files = job.get("open_files", 256)
    processes = job["processes"] + (2 if os.getppid() == 1 else 1 + _mine())
    for what, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, size, size),
        (resource.RLIMIT_NOFILE, files, files),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, processes, processes),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (soft, hard))
    _control(_PR_SET_NO_NEW_PRIVS, 1)
    _control(_PR_SET_DUMPABLE, 1)


def _mine() -> int:
    """How many threads this user has."""
    mine = 0
    for pid in _pids():
        with contextlib.suppress(OSError, KeyError, ValueError), open(f"/proc/{pid}/status") as status:
            facts = dict(line.split(":\t", 1) for line in status if ":\t" in line)
            if int(facts["Uid"].split()[0]) == os.getuid():
                mine += int(facts["Threads"])
    return mine


def _below() -> list[int]:
    """The processes of this sandbox, without this one; without walls, those below this one."""
    if os.getpid() == 1:
        return [pid for pid in _pids() if pid != 1]
    parents: dict[int, int] = {}
    for pid in _pids():
        with _unless_ended(), open(f"/proc/{pid}/stat") as stat:
            parents[pid] = int(stat.read().rpartition(")")[2].split()[1])
    me = os.getpid()
    below = {me}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return [*(below - {me})]


def _pids() -> list[int]:
    with _unless_ended():  # or without a /proc
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


@contextlib.contextmanager
def _unless_ended() -> Iterator[None]:
    """What is read of a process that may have ended.

    Raises:
        OSError: it could not be read although the process may be there.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
    except (ValueError, IndexError):
        pass


def _resident_mb() -> float:
    """Memory of all processes.

    Raises:
        OSError: no descriptor is left with which it could be counted.
    """
    pages = 0
    with _spare_descriptors():
        for pid in _below():
            with _unless_ended(), open(f"/proc/{pid}/statm") as statm:
                pages += int(statm.read().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


_spare: list[int] = []
"""Descriptors that are open only to be closed: a list of processes takes one, and a file of theirs another."""


@contextlib.contextmanager
def _spare_descriptors() -> Iterator[None]:
    """While it looks at processes: others may have taken all further descriptors of the machine or of this user."""
    while _spare:
        os.close(_spare.pop())
    try:
        yield
    finally:
        _keep_spare()


def _keep_spare() -> None:
    with contextlib.suppress(OSError):
        while len(_spare) < 2:
            _spare.append(os.open(os.devnull, os.O_RDONLY))


def _end_all(pid: int) -> None:
    """Kill and reap all that a job has started."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        others = [-1]
        if os.getpid() != 1:
            others = [-pid]
            with contextlib.suppress(OSError), _spare_descriptors():
                others += _below()
        for other in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(other, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _tidy(folder: str, kept: set[str]) -> bool:
    """Remove what a job has written; whether nothing is left of it."""
    import shutil

    try:
        for path in ({folder} | _scratch()) - kept:
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
    except (OSError, RecursionError):
        return False
    return True


def _scratch() -> set[str]:
    return {entry.path for base in _SCRATCH for entry in os.scandir(base)} if os.getpid() == 1 else set()


def _control(option: int, value: int) -> None:
    """Linux's prctl; nothing elsewhere."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
