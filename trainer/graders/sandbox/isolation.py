"""What keeps a candidate's processes from everything else: namespaces, another uid, resource limits.

Three levels, of which a machine gives the first that works:

- "namespaces" (Linux 5.14, where user namespaces are allowed, or root): a user, mount, process, network and IPC
  namespace. There is no network, no process but the candidate's, and of the file system only the system's programs and
  libraries and the interpreter, read-only, with a /tmp that vanishes.
- "uid" (root, without namespaces, as in a plain container): another user id, without capabilities.
- "limits": resource limits alone, as this user.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LEVELS = ("namespaces", "uid", "limits")

HOME = "/tmp/home"
"""A candidate's own folder within its namespaces, empty at first."""

_libc = ctypes.CDLL(None, use_errno=True)

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_READ_ONLY_NO_SUID = 1 | 2
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")


def enter(level: str) -> None:
    """Put this process, and what it forks, behind a level's walls, except for those of `begin` and `drop`.

    Raises:
        OSError: this machine does not give the level.
    """
    adopt_orphans()
    if level == "namespaces":
        if not hasattr(_libc, "unshare"):
            raise OSError("this system has no namespaces")
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if os.geteuid() == 0:
            # Built with root's rights, so that an interpreter in a folder of root's can be used; then given up.
            _unshare(_NEWNS | _NEWNET | _NEWIPC)
            _new_root()
            become_other()
            _unshare_user(proc)
        else:
            _unshare_user(proc, _NEWNET | _NEWIPC)
            _new_root()
        os.close(proc)
    elif level == "uid":
        if os.geteuid() != 0:
            raise OSError("only root can change its uid")
        pid = os.fork()
        if pid == 0:
            try:
                become_other()
                os.listdir(os.path.dirname(os.__file__))
                os._exit(0 if os.access(sys.executable, os.X_OK) else 1)
            finally:
                os._exit(1)
        if os.waitpid(pid, 0)[1] != 0:
            raise OSError("another uid cannot read the interpreter")
    hide()


def begin(level: str, size_mb: int) -> None:
    """In a fork of `enter`'s process: namespaces for one candidate; returns in a process that is their init.

    Args:
        size_mb: the size of its /tmp, in MiB.
    """
    if level != "namespaces":
        return
    _unshare(_NEWPID | _NEWNS | _NEWIPC)
    if os.fork():
        os._exit(0)
    options = f"size={size_mb}m,mode=777"
    # An interpreter may be installed in one of these.
    covered = {path: os.open(path, os.O_PATH) for path in _folders() if path.startswith(("/tmp/", "/dev/shm/"))}
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path, fd in covered.items():
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", path, None, _MS_BIND | _MS_REC)
        os.close(fd)
    os.makedirs(HOME, exist_ok=True)
    try:
        _mount("proc", "/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except OSError:  # not allowed where a container's own /proc is masked; few programs need it
        _mount("tmpfs", "/proc", "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def drop(level: str, limits: Mapping[str, Any]) -> None:
    """In the process that will run the candidate: give up what is left of rights, and bound what it may use.

    Args:
        limits: `cpu_seconds`; `memory_mb`, of address space; `file_mb`; `processes`, with threads.
    """
    more = int(limits["processes"])
    if level == "uid":
        become_other()
    # A namespace counts its own three supervisors, and another uid has this process alone.
    processes = more + (1 + _mine() if level == "limits" else 3)
    seconds, size, memory = int(limits["cpu_seconds"]), limits["file_mb"] << 20, limits["memory_mb"] << 20
    for what, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, size, size),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, processes, processes),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (soft, hard))
    _control(_PR_SET_NO_NEW_PRIVS, 1)
    if hasattr(_libc, "capset"):
        _no_capabilities()
    _control(_PR_SET_DUMPABLE, 1)


def adopt_orphans() -> None:
    """Become the parent of processes whose parent ends, where the system can do that."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)


def hide() -> None:
    """Keep other processes of this user from tracing this one, and from opening its memory and descriptors."""
    _control(_PR_SET_DUMPABLE, 0)


def other_uid() -> int:
    """A uid that no account has, one per worker, so that candidates of two workers cannot signal each other."""
    return 58_000 + os.getpgid(0) % 2000


def become_other() -> None:
    """Give up root for `other_uid`."""
    uid = other_uid()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def resident_mb() -> float:
    """MiB in use by the processes below this one, without its own, and by System V shared memory; 0 without /proc."""
    pages = 0
    for pid in below():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    shared = 0
    if os.getpid() == 1:
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
            shared = sum(int(line.split()[14]) for line in lines)
    return (pages * resource.getpagesize() + shared) / (1 << 20)


def below() -> list[int]:
    """The ids of this process's descendants; those whose parent has ended are this process's, a subreaper's."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    below, me = [], os.getpid()
    for pid in parents:
        above = parents.get(pid)
        while above is not None and above not in (me, 0, 1):
            above = parents.get(above)
        if above == me and pid != me:
            below.append(pid)
    return below


def end_all(group: int | None) -> None:
    """Kill and reap every process below this one, and a process group."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            for pid in [*below(), *([-group] if group else [])]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _mine() -> int:
    """How many threads this user has."""
    mine = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            facts = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if int(facts["Uid"].split()[0]) == os.getuid():
                mine += int(facts["Threads"])
    return mine


def _folders() -> list[str]:
    """What a candidate sees of the file system, an upper folder before what lies in it."""
    python = (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix)
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    wanted = [*_SYSTEM, *_SETTINGS, *python, *(path for path in libraries if path.startswith("/"))]
    return sorted({os.path.abspath(path) for path in wanted if os.path.exists(path)} - {"/"})


def _new_root() -> None:
    """Replace the file system by a read-only one with the system's programs, the interpreter, and empty folders."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    folders = _folders()
    # Opened before a tmpfs hides what lies in /tmp.
    sources = {path: os.open(path, os.O_PATH) for path in folders if not os.path.islink(path)}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    links = {path: os.readlink(path) for path in folders if os.path.islink(path)}
    links |= {"/dev/fd": "/proc/self/fd"}
    links |= {f"/dev/{name}": f"/proc/self/fd/{fd}" for fd, name in enumerate(("stdin", "stdout", "stderr"))}
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for empty in ("/proc", "/dev/shm", "/tmp"):
        os.makedirs(root + empty, mode=0o755)
    bound: list[str] = []
    for path, fd in (sources | devices).items():
        if any(path.startswith(f"{other}/") for other in bound):
            continue
        target = root + path
        if path in devices or not os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            Path(target).touch()
        else:
            os.makedirs(target, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", target, None, _MS_BIND | _MS_REC)
        bound.append(path)
    for path, to in links.items():
        if not os.path.lexists(root + path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(to, root + path)
    for fd in (sources | devices).values():
        os.close(fd)
    # A new /proc can be mounted only where another is visible; `begin` always hides this one.
    _mount("/proc", root + "/proc", None, _MS_BIND | _MS_REC)
    _set_read_only(root)
    os.chdir(root)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def _unshare_user(proc: int, more: int = 0) -> None:
    """Enter a user and mount namespace in which this user has its own id, all capabilities, and no further ones."""
    uid, gid = os.getuid(), os.getgid()
    _control(_PR_SET_DUMPABLE, 1)  # after a change of uid the maps could not be written
    _unshare(_NEWUSER | _NEWNS | more)
    for name, text in (
        ("self/setgroups", "deny"),
        ("self/uid_map", f"{uid} {uid} 1"),
        ("self/gid_map", f"{gid} {gid} 1"),
        ("sys/user/max_user_namespaces", "0"),
    ):
        fd = os.open(name, os.O_WRONLY, dir_fd=proc)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _control(option: int, value: int) -> None:
    """Linux's prctl; nothing elsewhere."""
    with contextlib.suppress(AttributeError):
        _libc.prctl(option, value, 0, 0, 0)


def _unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _checked(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _set_read_only(root: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY_NO_SUID, 0, 0, 0)
    call = ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), ctypes.c_char_p(os.fsencode(root))
    done = _libc.syscall(*call, ctypes.c_uint(_AT_RECURSIVE), attributes, ctypes.c_size_t(ctypes.sizeof(attributes)))
    _checked(done, "mount_setattr")


def _no_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _checked(result: int, call: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
