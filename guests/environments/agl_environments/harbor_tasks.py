"""Task folders in Harbor's format, which a policy solves with commands in a sandbox. Their tests grade it in another.

The sandbox has this machine's programs, the task's files, and no network; a task that needs more is refused when it is
loaded. Source: Harbor 0.26, models/task and verifier.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from agl.errors import ConfigError, DatasetError
from agl.trainer.graders.programs.running import interpreter_folders
from agl.trainer.processes.sandboxes import chosen
from agl_environments.asking import Ask, Message, function_tool, message_of, tool_calls
from agl_environments.harbor_sandbox import Root, Sandbox, Unfit, opened, said

_BASES = ("ubuntu", "debian", "python", "bash", "buildpack-deps")
"""Images that hold what a machine has anyway."""
_TAKEN = {
    "agl",
    "bin",
    "dev",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "logs",
    "nix",
    "proc",
    "sbin",
    "solution",
    "sys",
    "tests",
    "tmp",
    "usr",
}
"""Folders below / that are the system's, or of the format."""
_KNOWN = {
    "environment": {
        "build_timeout_sec",
        "cpus",
        "memory_mb",
        "storage_mb",
        "allow_internet",
        "network_mode",
        "env",
        "workdir",
    },
    "agent": {"timeout_sec", "network_mode"},
    "verifier": {"timeout_sec", "network_mode", "env"},
}
"""Tables of task.toml -> what may be set in them."""
_UNREAD = {"schema_version", "version", "task", "metadata", "source", "solution"}
_REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""Where tests write the reward; of both, the lower one counts: what the tests start may have written the other."""
_TOOL = function_tool(
    "bash",
    "Run a command in the working directory. It ends with everything that it has started.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


class _Folder(NamedTuple):
    """A task. `root`: what its sandboxes begin with; `seconds`: of the agent's commands, and of the tests."""

    path: Path
    question: str
    root: Root
    test_environment: Mapping[str, str]
    seconds: tuple[float, float]


class Harbor:
    """The tasks below a folder, or the one that it is.

    Args:
        system: a system prompt.
        max_turns: after so many answers the tests run.
        command_seconds: of each command.
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
        left = folder.seconds[0]
        loop = asyncio.get_running_loop()
        async with opened(folder.root) as sandbox:
            for _ in range(self._turns):
                messages.append(message_of(await ask(messages, [_TOOL])))
                for call_id, name, arguments in tool_calls(messages[-1]):
                    command = (arguments or {}).get("command")
                    answer = "there is one tool: bash, with a text, command"
                    if name == "bash" and isinstance(command, str):
                        began = loop.time()
                        answer = said(await sandbox.run(command, min(self._seconds, left)))
                        left -= loop.time() - began
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": answer})
                if messages[-1]["role"] == "assistant" or left <= 0:
                    break
            work = await _left(sandbox)
        score, _ = await _graded(folder, work)
        if not score and folder.path not in self._sound:
            # Tests that reward the task's solution are in order: it was the policy's work that they did not reward.
            async with opened(folder.root) as sandbox:
                solution = _files(folder.path / "solution")
                await sandbox.run("bash /solution/solve.sh", folder.seconds[0], files=solution)
                work = await _left(sandbox)
            best, printed = await _graded(folder, work)
            if (best or 0) <= 0:
                raise RuntimeError(f"the tests of {folder.path} do not reward its own solution: {printed}")
            self._sound.add(folder.path)
        return score or 0.0


async def _left(sandbox: Sandbox) -> IO[bytes] | str:
    """A copy of the task's folders as they were left, or why there can be none."""
    try:
        return await sandbox.copy()
    except Unfit as error:
        return str(error)


async def _graded(folder: _Folder, work: IO[bytes] | str) -> tuple[float | None, str]:
    """Run the tests on what was left, in a root that nobody has written to.

    Returns:
        The reward that the tests wrote, or None if they wrote none that can be read; and what they printed.

    Raises:
        RuntimeError: they did not run, so that no reward is theirs.
    """
    if isinstance(work, str):
        return None, work
    with work:
        async with opened(folder.root, work) as sandbox:
            report = await sandbox.run(
                "bash /tests/test.sh",
                folder.seconds[1],
                files=_files(folder.path / "tests"),
                environment=folder.test_environment,
                read=_REWARDS,
            )
    if not report.get("ran"):
        raise RuntimeError(f"the tests of {folder.path} did not run: {said(report)}")
    # Tests that were ended have not come to a reward, whatever they had written by then.
    texts = () if "reason" in report else report["texts"]
    scores = [score for text in texts if (score := _score(text)) is not None]
    return min(scores, default=None), said(report)


def _score(text: str) -> float | None:
    """The reward that a file says; None if it says none."""
    try:
        value = json.loads(text)
        score = float(value["reward"] if isinstance(value, dict) else value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return score if math.isfinite(score) else None


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
    root = Root(
        name=str(path),
        workdir=workdir,
        files=files,
        environment=environment | image.get("env", {}),
        memory_mb=int(image.get("memory_mb") or 2048),
        disk_mb=int(image.get("storage_mb") or 256),
    )
    seconds = (float(agent.get("timeout_sec") or 600.0), float(tests.get("timeout_sec") or 600.0))
    return _Folder(path, question, root, tests.get("env", {}), seconds)


def _image(path: Path, dockerfile: str, own_workdir: str | None) -> tuple[str, dict[str, Path], dict[str, str]]:
    """(working directory, files, variables) of a Dockerfile that adds no more than these to a base image."""
    context = path / "environment"
    workdir = PurePosixPath("/")
    files = dict[str, Path]()
    environment = dict[str, str]()
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
    taken = _TAKEN | {PurePosixPath(path).parts[1] for path in interpreter_folders(sys.executable)}
    for place in (str(workdir), *files):
        parts = PurePosixPath(place).parts
        if len(parts) < 2 or parts[1] in taken or ".." in parts:
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


def _files(folder: Path) -> dict[str, Path]:
    return {f"/{folder.name}/{name}": folder / name for name in _below(folder)}
