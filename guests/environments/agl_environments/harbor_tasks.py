"""Task folders in Harbor's format, which a policy solves with commands in a sandbox, and their own tests grade.

The sandbox has this machine's programs, the task's files, and no network; a task that needs more is refused when it is
loaded. Source: Harbor 0.26, models/task and verifier.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import math
import os
import random
import shlex
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from agl.errors import ConfigError, DatasetError
from agl.trainer.graders.programs.inside import plain
from agl.trainer.graders.programs.running import INSIDE, MODULES, interpreter_folders
from agl.trainer.processes.sandbox import PATH, Walls
from agl.trainer.processes.sandboxes import chosen
from agl_environments import harbor_inside
from agl_environments.asking import Ask, Message, function_tool, message_of, tool_calls

_BASES = ("ubuntu", "debian", "python", "bash", "buildpack-deps")
"""Images that hold what a machine has anyway."""
_TAKEN = {
    "agl", "bin", "dev", "etc", "lib", "lib32", "lib64", "logs", "nix", "proc", "sbin", "solution", "sys", "tests",
    "tmp", "usr",
}  # fmt: skip
"""Folders below / that are the system's, or of the format."""
_KNOWN = {
    "environment": {
        "build_timeout_sec", "cpus", "memory_mb", "storage_mb", "allow_internet", "network_mode", "env", "workdir",
    },
    "agent": {"timeout_sec", "network_mode"},
    "verifier": {"timeout_sec", "network_mode", "env"},
}  # fmt: skip
"""Tables of task.toml -> what may be set in them."""
_UNREAD = {"schema_version", "version", "task", "metadata", "source", "solution"}
_REWARD = "cd /logs/verifier; cat reward.json 2>/dev/null || cat reward.txt 2>/dev/null"
_OUTPUT_BYTES, _PROCESSES, _FIRST_UID, _UIDS = 16 << 10, 256, 62_000, 2_000
_uids = itertools.count(os.getpid())
_TOOL = function_tool(
    "bash",
    "Run a command in the working directory. It ends with everything that it has started.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


class _Folder(NamedTuple):
    """A task. `files`: path inside -> path here; `seconds`: of the agent's commands, and of the tests."""

    path: Path
    question: str
    workdir: str
    files: Mapping[str, Path]
    environment: Mapping[str, str]
    test_environment: Mapping[str, str]
    seconds: tuple[float, float]
    memory_mb: int
    disk_mb: int


class Harbor:
    """The tasks below a folder, or the one that it is.

    Args:
        system: a system prompt. max_turns: after so many answers the tests run. command_seconds: of each command.
    """

    def __init__(
        self, folder: str, *, system: str | None = None, max_turns: int = 50, command_seconds: float = 60.0
    ) -> None:
        self._root = Path(folder).expanduser().resolve()
        self._system, self._turns, self._seconds, self._sound = system, max_turns, command_seconds, set[Path]()
        chosen("bubblewrap")
        found = sorted(file.parent for file in self._root.rglob("task.toml"))
        self._tasks = {str(path.relative_to(self._root)): _read(path) for path in found}

    def tasks(self, n: int | None, seed: int) -> list[dict[str, Any]]:
        names = random.Random(seed).sample([*self._tasks], len(self._tasks))
        return [{"task": name, "question": self._tasks[name].question} for name in names[:n]]

    async def play(self, task: Mapping[str, Any], ask: Ask) -> float:
        if (folder := self._tasks.get(task["task"])) is None:
            raise DatasetError(f"{self._root} has no task {task['task']!r}")
        messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": folder.question})
        left, loop = folder.seconds[0], asyncio.get_running_loop()
        async with _opened(folder) as run:
            for _ in range(self._turns):
                messages.append(message_of(await ask(messages, [_TOOL])))
                for call_id, name, arguments in tool_calls(messages[-1]):
                    command, said = (arguments or {}).get("command"), "there is one tool: bash, with a text, command"
                    if name == "bash" and isinstance(command, str):
                        began = loop.time()
                        said = _said(await run(command, min(self._seconds, left)))
                        left -= loop.time() - began
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": said})
                if messages[-1]["role"] == "assistant" or left <= 0:
                    break
            score, _ = await _graded(folder, run)
        if not score and folder.path not in self._sound:
            # Tests that reward the task's solution are in order: it was the policy's work that they did not reward.
            async with _opened(folder) as run:
                await run("bash /solution/solve.sh", folder.seconds[0], files=_files(folder.path / "solution"))
                best, said = await _graded(folder, run)
            if (best or 0) <= 0:
                raise RuntimeError(f"the tests of {folder.path} do not reward its own solution: {said}")
            self._sound.add(folder.path)
        return score or 0.0


async def _graded(folder: _Folder, run: Any) -> tuple[float | None, str]:
    """(the reward that the tests write, None if they write none that can be read; what they printed)."""
    report = await run(
        "bash /tests/test.sh", folder.seconds[1], files=_files(folder.path / "tests"),
        emptied=[f"{harbor_inside.ROOT}/{name}" for name in ("logs/verifier", "tests")],
        environment={**folder.environment, **folder.test_environment},
    )  # fmt: skip
    with contextlib.suppress(ValueError, KeyError, TypeError):
        value = json.loads((await run(_REWARD, 60.0, "/"))["output"])
        score = float(value["reward"] if isinstance(value, dict) else value)
        return score if math.isfinite(score) else None, _said(report)
    return None, _said(report)


@contextlib.asynccontextmanager
async def _opened(folder: _Folder) -> AsyncIterator[Any]:
    """A sandbox with the task's files, which ends with the block: `run(command, seconds)`, the report of a job."""
    sandbox, root = chosen("bubblewrap"), harbor_inside.ROOT
    tops = {PurePosixPath(path).parts[1] for path in (folder.workdir, *folder.files)} | {"logs", "tests", "solution"}
    uid = _FIRST_UID + next(_uids) % _UIDS if os.geteuid() == 0 else os.getuid()
    start = f"import sys; sys.path.insert(0, {INSIDE!r}); from {harbor_inside.__name__} import main; main()"
    # One thread, as the kernel ends a sandbox with the thread that has started it.
    threads = ThreadPoolExecutor(1, "agl-harbor")
    process: Any = None
    here = {path: path for path in interpreter_folders(sys.executable)} | MODULES
    here |= {f"{INSIDE}/{harbor_inside.__name__.replace('.', '/')}.py": harbor_inside.__file__}
    environment = {"PATH": f"{os.path.dirname(sys.executable)}:{PATH}", "LANG": "C.UTF-8", "TERM": "dumb"}
    limits = {"memory_mb": folder.memory_mb, "processes": _PROCESSES}

    def exchange(job: Mapping[str, Any]) -> dict[str, Any]:
        try:
            plain.send(process.stdin.fileno(), job)
            return plain.parse(plain.receive(process.stdout.fileno(), 1 << 24))
        except (OSError, EOFError, plain.Malformed) as error:
            process.kill()
            said = process.stderr.read().decode(errors="replace").strip()
            raise RuntimeError(f"the sandbox of {folder.path} broke: {said[-500:] or repr(error)}") from error

    async def run(command: str, seconds: float, workdir: str = folder.workdir, **more: Any) -> dict[str, Any]:
        job = {
            "emptied": (), "files": {}, "environment": folder.environment, **more, **limits,
            "command": command, "workdir": workdir, "seconds": max(1.0, seconds), "file_mb": folder.disk_mb,
            "cpu_seconds": 1 << 30, "address_bytes": -1, "open_files": 4096, "output_bytes": _OUTPUT_BYTES,
        }  # fmt: skip
        return await asyncio.get_running_loop().run_in_executor(threads, exchange, job)

    try:
        with tempfile.TemporaryDirectory(prefix="agl-harbor-") as links:
            for top in tops:
                # bubblewrap makes a link where it is given one: a sandbox's own / cannot be written.
                os.symlink(f"{root}/{top}", here.setdefault(f"/{top}", f"{links}/{top}"))
            walls = Walls(folders=here, environment=environment, scratch_mb=folder.disk_mb, **limits)
            command = [sys.executable, "-I", "-c", start, str(uid)]
            process = await asyncio.get_running_loop().run_in_executor(threads, sandbox.start, command, walls)
        made = [f"{root}/{top}" for top in (*tops, ".home", folder.workdir[1:])]
        files = {path: _content(file) for path, file in folder.files.items()}
        if why := _said(await run("true", 60.0, "/", emptied=made, files=files)):
            raise RuntimeError(f"the files of {folder.path} do not fit into its sandbox: {why}")
        yield run
    finally:
        if process is not None:
            process.kill()
            threads.submit(process.communicate)
        threads.shutdown(wait=False)


def _read(path: Path) -> _Folder:
    """A task folder.

    Raises:
        ConfigError: it is none, or needs what the sandbox does not have.
    """
    try:
        config = tomllib.loads((path / "task.toml").read_text())
        question = (path / "instruction.md").read_text().strip()
        dockerfile = (path / "environment/Dockerfile").read_text()
        (path / "tests/test.sh").read_text()
    except (OSError, ValueError) as error:
        raise _refused(path, f"it is no task of one step with a Dockerfile and tests/test.sh ({error})") from None
    image, agent, tests = (config.get(name, {}) for name in _KNOWN)
    for name in config.keys() - _UNREAD:
        table = config[name] if isinstance(config[name], dict) else {name: config[name]}
        if unknown := sorted(key for key, value in table.items() if value and key not in _KNOWN.get(name, ())):
            raise _refused(path, f"its task.toml has [{name}] {', '.join(unknown)}")
    if any("${" in str(value) for table in (image, tests) for value in table.get("env", {}).values()):
        raise _refused(path, "task.toml takes a variable from this process's environment")
    workdir, files, environment = _image(path, dockerfile, image.get("workdir"))
    return _Folder(
        path, question, workdir, files, environment | image.get("env", {}), tests.get("env", {}),
        (float(agent.get("timeout_sec") or 600.0), float(tests.get("timeout_sec") or 600.0)),
        int(image.get("memory_mb") or 2048), int(image.get("storage_mb") or 256),
    )  # fmt: skip


def _image(path: Path, dockerfile: str, own_workdir: str | None) -> tuple[str, dict[str, Path], dict[str, str]]:
    """(working directory, files, variables) of a Dockerfile that adds no more than these to a base image."""
    context, workdir = path / "environment", PurePosixPath("/")
    files, environment = dict[str, Path](), dict[str, str]()
    for line in filter(None, map(str.strip, dockerfile.replace("\\\n", " ").splitlines())):
        name, _, rest = line.partition(" ")
        words = shlex.split(rest) if name in ("WORKDIR", "ENV", "COPY") else []
        if name == "WORKDIR" and len(words) == 1:
            workdir /= words[0]
        elif name == "ENV" and all("=" in word and "$" not in word for word in words):
            environment |= dict(word.split("=", 1) for word in words)
        elif name == "COPY" and len(words) == 2 and ".." not in words[0]:
            own = context / words[0].lstrip("/")
            to = workdir / words[1] / (own.name if own.is_file() and words[1].endswith(("/", ".")) else "")
            files |= {f"{to}/{each}": own / each for each in _below(own)} if own.is_dir() else {str(to): own}
        elif not (line[0] == "#" or name in ("CMD", "LABEL") or (name == "FROM" and rest.split(":")[0] in _BASES)):
            raise _refused(path, f"its Dockerfile has {line!r}")
    workdir = PurePosixPath(own_workdir or workdir)
    for place in (str(workdir), *files):
        parts = PurePosixPath(place).parts
        if len(parts) < 2 or parts[1] in _TAKEN or ".." in parts:
            raise _refused(path, f"its Dockerfile uses {place}, which is the system's")
    if absent := [str(file) for file in files.values() if not file.is_file()]:
        raise _refused(path, f"its Dockerfile copies {absent[0]}, which is not there")
    return str(workdir), files, environment


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be run: {why}",
        hint="leave it out, or run it by Harbor: here a task has no image, but this machine's programs; its Dockerfile "
        f"may have only FROM ({', '.join(_BASES)}), WORKDIR (below a folder of its own, such as /app), COPY and ENV",
    )


def _below(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def _files(folder: Path) -> dict[str, tuple[str, int]]:
    return {f"/{folder.name}/{name}": _content(folder / name) for name in _below(folder)}


def _content(file: Path) -> tuple[str, int]:
    return base64.b64encode(file.read_bytes()).decode(), 0o755 if os.access(file, os.X_OK) else 0o644


def _said(report: Mapping[str, Any]) -> str:
    """What a command printed, and how it ended if not well."""
    status = os.waitstatus_to_exitcode(report["status"]) if "status" in report else None
    ended = report.get("reason") or (f"exit status {status}" if status else "")
    return "\n".join(text for text in (report["output"].rstrip("\n"), ended and f"[{ended}]") if text)
