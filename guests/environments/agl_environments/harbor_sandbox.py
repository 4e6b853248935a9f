"""The sandbox of a Harbor task: commands run in it with the task's own folders, which can be copied to another one.

Invariant: a report is that of the job that was sent, or the sandbox broke.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from subprocess import Popen
from typing import IO, Any, TypeVar

from agl.rewards import files as reward_files
from agl.trainer.graders.programs.inside import copies, plain
from agl.trainer.graders.programs.running import INSIDE, MODULES, interpreter_folders
from agl.trainer.processes.bubblewrap import SYSTEM, Bubblewrap
from agl.trainer.processes.sandbox import PATH, Walls
from agl_environments import harbor_inside

_OUTPUT_BYTES = 16 << 10
_PROCESSES = 256
_FIRST_UID = 62_000
_UIDS = 2_000
_SETUP_SECONDS = 60.0
_PART = 1 << 20
_COPY_MB = 64
"""MiB that a copy of full size takes beside its bytes: a page for each of its files."""
_FORMAT = ("logs", "tests", "solution")
"""The format's own folders, which no copy has."""
_uids = itertools.count(os.getpid())
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Root:
    """What a task's sandbox begins with.

    Attributes:
        name: of the task, for errors.
        workdir: where commands run.
        files: path inside -> path here. environment:
            variables. memory_mb, disk_mb: MiB of memory, and of all files.
    """

    name: str
    workdir: str
    files: Mapping[str, Path]
    environment: Mapping[str, str]
    memory_mb: int
    disk_mb: int

    @property
    def tops(self) -> list[str]:
        """The task's own folders below /."""
        return sorted({PurePosixPath(path).parts[1] for path in (self.workdir, *self.files)})


class Unfit(Exception):
    """What was left in the task's folders cannot be copied."""


class Sandbox:
    """One that has started. Use `opened`."""

    def __init__(self, root: Root, process: Popen[bytes], threads: ThreadPoolExecutor) -> None:
        assert process.stdin
        assert process.stdout
        self._root = root
        self._process = process
        self._threads = threads
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        self._limits = {"memory_mb": root.memory_mb, "processes": _PROCESSES}

    async def run(
        self,
        command: str,
        seconds: float,
        *,
        files: Mapping[str, Path] | None = None,
        environment: Mapping[str, str] | None = None,
        read: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Run a command in the working directory, until it has ended with all that it has started.

        Args:
            files: path inside -> path here, that are written before.
            environment: more variables.
            read: files whose
                texts are read afterwards.

        Returns:
            What `said` shows; `ran` if the command was started, and `texts` then: those of `read`, "" for what is no
            regular file.
        """
        job = {
            "kind": "run",
            "command": command,
            "workdir": self._root.workdir,
            "seconds": max(1.0, seconds),
            "environment": {**self._root.environment, **(environment or {})},
            "read": list(read),
            **self._limits,
            "file_mb": self._root.disk_mb,
            "cpu_seconds": 1 << 30,
            "address_bytes": -1,
            "open_files": 4096,
            "output_bytes": _OUTPUT_BYTES,
        }
        return await self._in_turn(lambda: self._exchange(job, files or {}))

    async def copy(self) -> IO[bytes]:
        """An archive of the task's folders, for `opened`. Close it.

        Raises:
            Unfit: they cannot be copied.
        """
        return await self._in_turn(self._copy)

    async def make(self, copy: IO[bytes] | None) -> None:
        """Lay out the root: the task's files, or else a copy of its folders."""
        await self._in_turn(lambda: self._make(copy))

    def _copy(self) -> IO[bytes]:
        tops = self._root.tops
        most = self._root.disk_mb << 20
        inside = [f"{at}/{top}" for at in ("", harbor_inside.ROOT) for top in tops]
        links = [*inside, *SYSTEM, *interpreter_folders(sys.executable)]
        job = {"kind": "pack", "tops": tops, "workdir": self._root.workdir, "most_bytes": most, "links": links}
        report = self._exchange(job)
        if not report["packed"]:
            raise Unfit(f"it left {report['reason']}")
        archive = tempfile.TemporaryFile()  # noqa: SIM115, as the caller closes it
        try:
            for part in self._parts(most):
                archive.write(part)
            archive.seek(0)
        except BaseException:
            archive.close()
            raise
        return archive

    def _make(self, copy: IO[bytes] | None) -> None:
        made = [harbor_inside.HOME, *(f"{harbor_inside.ROOT}/{name}" for name in (*_FORMAT, "logs/verifier"))]
        if copy is None:
            made += [f"{harbor_inside.ROOT}/{top}" for top in self._root.tops]
            made += [f"{harbor_inside.ROOT}{self._root.workdir}"]
        job = {
            "kind": "make",
            "folders": made,
            "copied": copy is not None,
            "most_bytes": self._root.disk_mb << 20,
        }
        report = self._exchange(job, self._root.files if copy is None else {}, copy)
        if why := said(report):
            raise RuntimeError(f"the files of {self._root.name} do not fit into its sandbox: {why}")

    def _exchange(
        self, job: Mapping[str, Any], files: Mapping[str, Path] | None = None, copy: IO[bytes] | None = None
    ) -> dict[str, Any]:
        number = secrets.token_hex(16)
        contents = {path: _content(file) for path, file in (files or {}).items()}
        with self._broken():
            plain.send(self._in, {**job, "number": number, "files": contents})
            if copy is not None:
                for part in iter(lambda: copy.read(_PART), b""):
                    plain.send(self._in, part)
                plain.send(self._in, b"")
            report = plain.parse(plain.receive(self._out, 1 << 24))
            if report.get("number") != number:
                raise plain.Malformed("a report of another job than the last")
        return report

    def _parts(self, most: int) -> Iterator[bytes]:
        with self._broken():
            yield from copies.parts(self._out, most)

    @contextlib.contextmanager
    def _broken(self) -> Iterator[None]:
        """What goes wrong with the sandbox's streams, as an error that names it."""
        try:
            yield
        except (OSError, EOFError, plain.Malformed) as error:
            self._process.kill()
            assert self._process.stderr
            lines = self._process.stderr.read().decode(errors="replace").strip()
            raise RuntimeError(f"the sandbox of {self._root.name} broke: {lines[-500:] or repr(error)}") from error

    async def _in_turn(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


@contextlib.asynccontextmanager
async def opened(root: Root, copy: IO[bytes] | None = None) -> AsyncIterator[Sandbox]:
    """A new sandbox, which ends with the block.

    Args:
        copy: of the task's folders as they were in another one; None: its files as the task has them.
    """
    uid = _FIRST_UID + next(_uids) % _UIDS if os.geteuid() == 0 else os.getuid()
    start = f"import sys; sys.path.insert(0, {INSIDE!r}); from {harbor_inside.__name__} import main; main()"
    here = {path: path for path in interpreter_folders(sys.executable)} | MODULES
    for module in (harbor_inside, reward_files):
        here[f"{INSIDE}/{module.__name__.replace('.', '/')}.py"] = str(module.__file__)
    walls = Walls(
        folders=here,
        environment={"PATH": f"{os.path.dirname(sys.executable)}:{PATH}", "LANG": "C.UTF-8", "TERM": "dumb"},
        memory_mb=root.memory_mb,
        # The tests have as much room as the policy had, whatever it left.
        scratch_mb=root.disk_mb if copy is None else 2 * root.disk_mb + _COPY_MB,
        processes=_PROCESSES,
    )
    links = {f"/{top}": f"{harbor_inside.ROOT}/{top}" for top in (*root.tops, *_FORMAT)}
    command = [sys.executable, "-I", "-c", start, str(uid)]
    # One thread, as the kernel ends a sandbox with the thread that has started it.
    threads = ThreadPoolExecutor(1, "agl-harbor")
    process = None
    try:
        starting = asyncio.get_running_loop().run_in_executor
        process = await starting(threads, Bubblewrap(links).start, command, walls)
        sandbox = Sandbox(root, process, threads)
        await sandbox.make(copy)
        yield sandbox
    finally:
        if process is not None:
            process.kill()
            threads.submit(process.communicate)
        threads.shutdown(wait=False)


def said(report: Mapping[str, Any]) -> str:
    """What a command printed, and how it ended if not well."""
    status = os.waitstatus_to_exitcode(report["status"]) if "status" in report else None
    ended = report.get("reason") or (f"exit status {status}" if status else "")
    return "\n".join(text for text in (report["output"].rstrip("\n"), ended and f"[{ended}]") if text)


def _content(file: Path) -> tuple[str, int]:
    return base64.b64encode(file.read_bytes()).decode(), 0o755 if os.access(file, os.X_OK) else 0o644
