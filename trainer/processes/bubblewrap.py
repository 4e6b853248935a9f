"""A sandbox of Linux namespaces, made by bubblewrap (`bwrap`), with a system call filter of libseccomp.

A command sees the system's programs and libraries read-only, a /tmp and a /dev/shm of its own, no network, and no
process but its own, of which it is the first. When this process or bwrap ends, the kernel ends them all.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from agl.trainer.processes.sandbox import Sandbox, Walls, piped, tried

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
"""The system's programs and libraries, which every sandbox has."""
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_INSTALL = "apt-get install bubblewrap libseccomp2"

_DENIED = (
    # Keyrings outlive a sandbox.
    "add_key keyctl request_key",
    # Memory that no limit counts.
    "memfd_create memfd_secret shmget shmat shmctl shmdt msgget msgsnd semget semop mq_open",
    # Other processes.
    "ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp",
    # Large parts of the kernel that no program here needs.
    "io_uring_setup io_uring_enter io_uring_register bpf perf_event_open userfaultfd fanotify_init",
    "name_to_handle_at open_by_handle_at lookup_dcookie uselib modify_ldt vm86 vm86old iopl ioperm",
    # Other walls than these.
    "unshare setns chroot mount umount2 pivot_root fsopen fsconfig fsmount fspick open_tree move_mount mount_setattr",
    # The machine.
    "acct adjtimex clock_adjtime clock_settime settimeofday delete_module finit_module init_module kexec_file_load",
    "kexec_load quotactl quotactl_fd reboot swapoff swapon syslog vhangup",
)
_NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags of clone(2): CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, all of them without a network; AF_VSOCK would reach the host."""
_MOST_STEPS = 4096
"""Parts of a path and of what its links say: more than any path has that leads somewhere."""
_ALLOW = 0x7FFF0000
_ERRNO = 0x50000
_EQUAL = 4
_AT_LEAST = 5
_MASKED = 7
_MOST_FAMILIES = 64


class _Comparison(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class Bubblewrap(Sandbox):
    """bubblewrap 0.8 or newer, as root or as any user who may make user namespaces.

    Args:
        links: that a command finds: path inside -> where it leads inside.
    """

    name = "bubblewrap"

    def __init__(self, links: Mapping[str, str] | None = None) -> None:
        self._links = links or {}

    def problem(self) -> str | None:
        if not shutil.which("bwrap"):
            return f"bwrap is not installed ({_INSTALL})"
        try:
            _filter()
        except OSError as error:
            return f"libseccomp cannot be used: {error} ({_INSTALL})"
        return _proc()[1]

    def start(self, command: Sequence[str], walls: Walls) -> subprocess.Popen[bytes]:
        arguments, filtered = _arguments(walls, _proc()[0], self._links)
        try:
            return piped([*arguments, "--", *command], walls.environment, [filtered])
        finally:
            os.close(filtered)


@functools.cache
def _proc() -> tuple[tuple[str, ...], str | None]:
    """How a command gets a /proc, and why no sandbox can be made here.

    A /proc of its own is not allowed where a container's is masked; few programs need one.
    """
    walls = Walls(folders={}, environment={}, memory_mb=1, scratch_mb=1, processes=8)
    for proc in (("--proc", "/proc"), ("--dir", "/proc")):
        arguments, filtered = _arguments(walls, proc, {})
        problem = tried([*arguments, "--", "/usr/bin/env", "true"], [filtered])
        os.close(filtered)
        if problem is None:
            break
    return proc, problem


def _arguments(walls: Walls, proc: tuple[str, ...], links: Mapping[str, str]) -> tuple[list[str], int]:
    """(bwrap and its options, the descriptor of the filter that they name)."""
    reader, writer = os.pipe()
    os.write(writer, _filter())
    os.close(writer)
    scratch = ["--perms", "1777", "--size", str(walls.scratch_mb << 20), "--tmpfs"]
    arguments = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--as-pid-1", "--die-with-parent", "--new-session", "--seccomp", str(reader), "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # the command gives up root by itself: a folder of root's may hold its interpreter
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user"]
    arguments += ["--dev", "/dev", *scratch, "/dev/shm", *scratch, "/tmp", *proc]
    system = {path: path for path in (*SYSTEM, *_SETTINGS) if os.path.exists(path)}
    for inside, (option, source) in sorted(_placed(system | dict(walls.folders), links).items()):
        for parent in reversed(Path(inside).parents[:-1]):  # which would be as private as they are here
            arguments += ["--perms", "0755", "--dir", str(parent)]
        arguments += [option, source, inside]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"], reader


def _placed(folders: Mapping[str, str], links: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Path inside -> (bwrap's option that puts something there, what).

    What is seen at its own path is reached as it is here: by the same links, to the folder or file that they lead to.
    """
    placed = {inside: ("--symlink", target) for inside, target in links.items()}
    same = dict[str, tuple[str, str]]()
    for inside, path in folders.items():
        real = os.path.realpath(path)
        if inside == path:
            same[real] = ("--ro-bind", real)
            same |= {link: ("--symlink", target) for link, target in _links_to(path).items()}
        else:
            placed[inside] = ("--ro-bind", real)
    whole = [place for place, (option, _) in same.items() if option == "--ro-bind"]
    for place, put in same.items():
        if not any(place != folder and Path(place).is_relative_to(folder) for folder in whole):
            placed[place] = put
    return placed


def _links_to(path: str) -> dict[str, str]:
    """The symbolic links that lead from a path to what is there: their own paths, without links -> their targets."""
    found = dict[str, str]()
    place = "/"
    waiting = list(Path(path).parts)
    for _ in range(_MOST_STEPS):
        if not waiting:
            break
        part = waiting.pop(0)
        step = os.path.dirname(place) if part == ".." else os.path.join(place, part)
        if os.path.islink(step):
            found[step] = os.readlink(step)
            waiting = [*Path(found[step]).parts, *waiting]
        else:
            place = step
    return found


@functools.cache
def _filter() -> bytes:
    """The system call filter, as BPF.

    Raises:
        OSError: libseccomp is not installed, or fails.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def deny(call: str, code: int, *comparison: int) -> None:
        number = library.seccomp_syscall_resolve_name(call.encode())
        one = (_Comparison * 1)(_Comparison(*comparison)) if comparison else None
        action = ctypes.c_uint32(_ERRNO | code)
        # A call that this processor's Linux does not have has a negative number, and needs no rule.
        if number >= 0 and library.seccomp_rule_add_array(rules, action, number, len(comparison) and 1, one):
            raise OSError(f"no rule for {call}")

    for call in " ".join(_DENIED).split():
        deny(call, errno.EPERM)
    for flag in _NAMESPACES:
        deny("clone", errno.EPERM, 0, _MASKED, flag, flag)
    deny("clone3", errno.ENOSYS)  # its flags cannot be seen; the C library then calls clone
    for family in set(range(_MOST_FAMILIES)) - set(_FAMILIES):
        deny("socket", errno.EAFNOSUPPORT, 0, _EQUAL, family, 0)
    deny("socket", errno.EAFNOSUPPORT, 0, _AT_LEAST, _MOST_FAMILIES, 0)
    with tempfile.TemporaryFile() as file:
        if library.seccomp_export_bpf(rules, file.fileno()):
            raise OSError("the filter cannot be exported")
        library.seccomp_release(rules)
        file.seek(0)
        return file.read()
