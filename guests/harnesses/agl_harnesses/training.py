"""A coding agent as an agent that can be trained: each attempt has a working copy of its own behind walls.

Invariants: what runs inside reaches the attempt's address and no other; the hidden tests and every key stay outside;
nothing outlives the attempt but the files of its copy.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from agl import tracing
from agl.agents.agent import Agent, Outcome, RewardFunction
from agl.errors import ConfigError, RolloutError
from agl.rewards.function import RewardCaller
from agl.tracing import propagation
from agl.trainer.gateway.http import keyed
from agl.trainer.graders.programs.inside import copies, plain
from agl.trainer.graders.programs.running import INSIDE, MODULES, interpreter_folders
from agl.trainer.processes.sandbox import PATH, Sandbox, Walls
from agl.trainer.processes.sandboxes import chosen
from agl.trainer.runners.command import CommandAgent, CommandFailed
from agl.trainer.runners.recording_proxy import PROVIDERS, URLS
from agl_harnesses import inside
from agl_harnesses.front import Onward, UnixServer, front_app
from agl_harnesses.harness import Attempt, Harness, Providers
from agl_harnesses.session import check_version, known

_KEYS = {
    propagation.OPENAI_KEY: ("openai", "authorization", "Bearer "),
    propagation.ANTHROPIC_KEY: ("anthropic", "x-api-key", ""),
    propagation.GOOGLE_KEYS[0]: ("google", "x-goog-api-key", ""),
}
"""Variable of a key -> the API that it is for, the header in which that takes it, and what precedes it there."""
_ACCOUNTS = {
    "OPENAI_ORG_ID": ("openai", "openai-organization", ""),
    "OPENAI_PROJECT_ID": ("openai", "openai-project", ""),
}
"""The same of variables that say which account is charged."""
_POLL_SECONDS = 0.1
_END_SECONDS = 10.0
_FIRST_UID = 60_000
_UIDS = 2_000
_uids = itertools.count(os.getpid())


class LimitExceeded(CommandFailed):
    """What the policy had the coding agent do exceeded a limit."""

    cause = "limit"


class HarnessAgent(CommandAgent):
    """What `agl.harness` returns."""

    sub_agents = True

    def __init__(self, place: _Place, error_reward: float | None) -> None:
        Agent.__init__(self, place.harness.name, place.run, True, (), error_reward)


def harness(
    name: str | type[Harness],
    *,
    task: Callable[[Any], str],
    files: Callable[[Any], Mapping[str, str]],
    grade: RewardFunction,
    words: Sequence[str] = (),
    home: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    folders: Sequence[str | Path] = (),
    allow: Sequence[str] = (),
    model: str = "policy",
    timeout: float = 300.0,
    memory_mb: int = 2048,
    disk_mb: int = 256,
    output_mb: int = 4,
    processes: int = 256,
    isolation: str | Sandbox = "auto",
    error_reward: float | None = None,
) -> HarnessAgent:
    """A coding agent as an agent: `agl.harness("mini-swe-agent", task=..., files=..., grade=...)`.

    Each attempt starts the program in a new sandbox, in /tmp/work with the task's files. It reaches the attempt's
    model and no other host, and writes nowhere but below /tmp, of which only the working copy outlives it. It ends with
    all that it started; then its copy is graded, outside. Its calls are those of an agent of the harness's name, or of
    its sub-agents' (docs/harnesses.md).

    An attempt that exceeds a limit is the policy's failure, and trained as such. One that ends with a status other
    than 0 raises, as those of `agl.CommandAgent` do. A program that fails before its first call, a model that cannot be
    reached and a sandbox that breaks are failures of the infrastructure.

    Args:
        name: of the coding agent or of its program; or a `Harness` class.
        task: (task) -> what the agent is to do.
        files: (task) -> the working copy: path -> text. A text that begins with #! can be run.
        grade: (task, folder) -> float or dict of floats, sync or async. `folder`, a `Path`, holds the regular files of
            the copy at the end, and is removed afterwards. It does not run in the sandbox: run no program of the copy
            in it but by `agl.rewards.PythonTests`.
        words: further options of the program.
        home: files of its HOME, path -> text, /tmp/home inside.
        env: its variables, to which nothing of this process's are added. Where no policy answers, OPENAI_BASE_URL,
            ANTHROPIC_BASE_URL and GOOGLE_GEMINI_BASE_URL say who does; OPENAI_API_KEY, ANTHROPIC_API_KEY and
            GEMINI_API_KEY do not reach the sandbox; OPENAI_ORG_ID and OPENAI_PROJECT_ID are sent with every call.
        folders: of this machine, that can be read inside, at the same paths; their `bin` comes first in its PATH.
        allow: what a call to a provider may hold besides messages and the program's own tools, by the names with which
            it is refused: "web_search", "mcp_servers", "header openai-organization" (docs/security.md).
        model: what its calls name.
        timeout: seconds in which it waits for no model; all of an attempt is limited by `Trainer(timeout=)`.
        memory_mb, processes: of all its processes.
        disk_mb: MiB of all that it writes.
        output_mb: MiB that it prints.
        isolation: as of `agl.rewards.PythonTests`, with walls and on this machine. A container's image has the program.
        error_reward: as of `agl.CommandAgent`.

    Raises:
        ConfigError: no such coding agent, it is not installed, or no sandbox works here.
    """
    kinds = {program: kind for kind in known() for program in (kind.name, *kind.programs)}
    kind = kinds.get(name) if isinstance(name, str) else name
    if kind is None:
        raise ConfigError(
            f"agl.harness({name!r}): no such coding agent",
            hint=f"give one of {', '.join(dict.fromkeys(k.name for k in kinds.values()))}, or a Harness class",
        )
    limits = {"timeout": timeout, "memory_mb": memory_mb, "disk_mb": disk_mb, "output_mb": output_mb}
    for what, value in (limits | {"processes": processes}).items():
        if not value > 0:
            raise ConfigError(f"agl.harness({what}={value!r})", hint="give more than 0")
    if isinstance(allow, str):
        raise ConfigError(f"agl.harness(allow={allow!r})", hint=f"give a list: [{allow!r}]")
    sandbox = chosen(isolation)
    one = kind()
    if not sandbox.mounts:
        raise ConfigError(
            f"isolation={sandbox.name!r} has no walls on this machine", hint='give "bubblewrap", "podman" or "docker"'
        )
    path = next(filter(None, map(shutil.which, kind.programs)), None)
    if path is None and sandbox.python is None:
        raise ConfigError(f"{kind.name} is not installed: none of {', '.join(kind.programs)}", hint=kind.install)
    mounted = [os.path.abspath(folder) for folder in folders]
    paths = [f"{folder}/bin" for folder in mounted]
    program = kind.programs[0]
    if path is not None and sandbox.python is None:
        check_version(one, path)
        program, needed, directories = _installed(Path(path).resolve())
        mounted = [*mounted, *needed]
        paths = [*paths, *directories]
    return HarnessAgent(
        _Place(
            one,
            task,
            files,
            RewardCaller(grade),
            [program, *words],
            home or {},
            env or {},
            model,
            timeout,
            sandbox,
            frozenset(allow),
            Walls(
                folders=MODULES | {path: path for path in mounted},
                environment={"PATH": PATH, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
                memory_mb=memory_mb,
                scratch_mb=disk_mb,
                processes=processes,
            ),
            output_mb,
            ":".join(dict.fromkeys([*paths, PATH, str(Path(sys.executable).parent)])),
        ),
        error_reward,
    )


def _installed(program: Path) -> tuple[str, list[str], list[str]]:
    """(a program's path, what has to be readable for it to run, directories of its PATH).

    Raises:
        ConfigError: its interpreter is missing.
    """
    # What interprets it: "#!/usr/bin/env node", "#!/.../bin/python3".
    line = program.open("rb").readline(1000)
    names = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    interpreter = shutil.which(names[-1] if Path(names[0]).name == "env" else names[0]) if names else None
    if names and interpreter is None:
        raise ConfigError(f"{program} needs {names[-1]}, which is not installed", hint=f"install {names[-1]}")
    needed = [str(program)]
    if "node_modules" in program.parts:
        at = program.parts.index("node_modules")
        needed = [str(Path(*program.parts[: at + 1]))]
    directories = []
    if interpreter is not None:
        python = "python" in Path(interpreter).name
        needed += interpreter_folders(interpreter) if python else [str(Path(interpreter).resolve())]
        directories = [] if python else [str(Path(interpreter).resolve().parent)]
    needed += interpreter_folders(sys.executable)
    return str(program), [path for path in needed if not path.startswith(("/usr/", "/bin/"))], directories


@dataclass(frozen=True, eq=False)
class _Place:
    """Where the attempts of one coding agent run: the arguments of `harness`."""

    harness: Harness
    task: Callable[[Any], str]
    files: Callable[[Any], Mapping[str, str]]
    grade: RewardCaller
    words: list[str]
    home: Mapping[str, str]
    env: Mapping[str, str]
    model: str
    timeout: float
    sandbox: Sandbox
    allow: frozenset[str]
    walls: Walls
    output_mb: int
    path: str

    async def run(self, task: Any, *_: Any) -> Outcome:
        """One attempt."""
        root = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="agl-harness-")
        try:
            copy, report = await self._attempt(task, Path(root.name))
            began = time.monotonic()
            grade = self.grade
            # What a sync function calls may block.
            reward = await (grade.call_async(task, copy) if grade.is_async else asyncio.to_thread(grade, task, copy))
            output = {name: report[name] for name in ("said", "refused") if report[name]}
            return Outcome(reward, output, time.monotonic() - began)
        finally:
            await asyncio.to_thread(root.cleanup)  # of thousands of files

    async def _attempt(self, task: Any, root: Path) -> tuple[Path, dict[str, Any]]:
        """Run the coding agent: (its working copy, what `inside` reports).

        Raises:
            CommandFailed: it ended badly.
            RolloutError: the infrastructure failed.
        """
        keys: dict[str, list[tuple[str, str]]] = {}
        for name, (api, header, word) in (_KEYS | _ACCOUNTS).items():
            if name in self.env:
                keys.setdefault(api, []).append((header, word + self.env[name]))
        front = Onward(self.harness, keys, self.allow)
        app = front_app(front)
        server = UnixServer(app, error=RolloutError)
        app.state.limits = server.limits
        gateway = root / "gateway"
        gateway.mkdir(mode=0o755)
        server.path = str(gateway / "socket")
        job = await asyncio.to_thread(self._job, task, root, front)
        # Outside of the attempt's context, in which what `front` sends would be recorded a second time.
        await asyncio.create_task(server.start(), context=contextvars.Context())
        try:
            report = await self._in_sandbox(job, gateway, front, root / "copy")
        finally:
            await server.stop()
            await front.close()
        # Hosts that it asked for, and calls.
        report["refused"] = {**report["refused"], **front.refused}
        failed = front.status is not None and (front.status >= 500 or front.status in (401, 403, 429))
        said = f"; not passed on: {', '.join(front.refused)}" if front.refused else ""
        said += f"; its output:\n{report['said']}" if report["said"] else ""
        if report.get("status") != 0 and (front.status is None or failed):
            raise RolloutError(
                f"{self.harness.name} {_how(report)} "
                + (f"after its model answered {front.status}" if failed else "before its first call")
                + said,
                hint="the model's server says why"
                if failed
                else "agl.harness starts it as docs/harnesses.md says; words=, home= and env= change how",
            )
        if "reason" in report:
            raise LimitExceeded(f"{self.harness.name} {report['reason']}{said}")
        if report["status"] != 0:
            raise CommandFailed(f"{self.harness.name} {_how(report)}{said}")
        return root / "copy" / PurePosixPath(inside.WORK).name, report

    def _job(self, task: Any, root: Path, front: Onward) -> dict[str, Any]:
        """What `inside` gets, and where the calls that come by go from `front`.

        Raises:
            ConfigError: `task` or `files` gave something else.
        """
        home = root / "home"
        config = root / "config"
        for folder in (home, config):
            folder.mkdir()
        own = {name: value for name, value in self.env.items() if name not in _KEYS}
        environment = {
            "PATH": self.path,
            "HOME": str(home),
            "TMPDIR": inside.SCRATCH,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }
        proxy = f"http://127.0.0.1:{inside.PORT}"
        for name, value in (("http_proxy", proxy), ("https_proxy", proxy), ("no_proxy", "127.0.0.1,localhost")):
            environment |= {name: value, name.upper(): value}
        attempt = Attempt(list(self.words), environment | own, config, routed=True)
        text = self.task(task)
        if not isinstance(text, str):
            raise ConfigError(f"agl.harness(task=...) gave {text!r}", hint="give a text: what the agent is to do")
        self.harness.alone(attempt, text, self.model)
        _write(home, self.home, "home=")
        files = _read(home, inside.HOME)  # before programs that say what their settings are leave others there
        providers = PROVIDERS | self.harness.providers(attempt)
        places = {api: urllib.parse.urlsplit(url) for api, url in providers.items()}
        # The provider's host is in the path: by it some decide how they write a request.
        prefixes = {api: f"/{api}/{at.hostname}{at.path.rstrip('/')}" for api, at in places.items()}
        front.prefixes = prefixes
        front.addresses, front.is_policy = self._addresses(providers)
        attempt.urls = {api: f"http://127.0.0.1:{inside.PORT}{prefix}" for api, prefix in prefixes.items()}
        self.harness.point(attempt)
        work = root / "work"
        _write(work, self.files(task), "files=")

        def moved(word: str) -> str:
            return word.replace(str(config), inside.CONFIG).replace(str(home), inside.HOME)

        return {
            "files": files | _read(config, inside.CONFIG) | _read(work, inside.WORK),
            "words": [moved(word) for word in attempt.words],
            "environment": {name: moved(value) for name, value in attempt.environment.items()},
            "memory_mb": self.walls.memory_mb,
            "disk_mb": self.walls.scratch_mb,
            "file_mb": self.walls.scratch_mb,
            "output_mb": self.output_mb,
            "processes": self.walls.processes,
            # Time is counted out here, and addresses are not memory.
            "seconds": 1e9,
            "cpu_seconds": 1 << 30,
            "address_bytes": -1,
            "open_files": 4096,
            "poll_ms": 100,
        }

    def _addresses(self, providers: Providers) -> tuple[Callable[[str], Providers], Callable[[str], bool]]:
        """(an agent's name) -> where its calls go, and whether a policy answers there."""
        scope = tracing.current()
        if scope is None:
            raise ConfigError("agl.harness was called outside of a rollout", hint="use agl.Trainer or agl.evaluate")
        rollout = scope.rollout
        main = self.harness.name
        own = {variable: url for api, variable in URLS.items() if (url := self.env.get(variable) or providers.get(api))}
        recorded = rollout.recorder(main, own) if rollout.recorder is not None else {}

        def is_policy(agent: str) -> bool:
            return rollout.gateway_url is not None and rollout.selection.policy_for(agent) is not None

        def addresses(agent: str) -> Providers:
            if is_policy(agent):
                url = f"{rollout.gateway_url}/rollouts/{rollout.rollout_id}/attempts/{rollout.attempt}"
                variables = propagation.gateway_variables(url, agent, rollout.key)
                return {api: keyed(variables[variable], rollout.key) for api, variable in URLS.items()}
            old, new = (f"/agents/{urllib.parse.quote(name, safe='')}/" for name in (main, agent))
            return {api: recorded[variable].replace(old, new) for api, variable in URLS.items()}

        return addresses, is_policy

    async def _in_sandbox(self, job: dict[str, Any], gateway: Path, front: Onward, copy: Path) -> dict[str, Any]:
        """The report of `inside`. Where all went well, the working copy is below `copy`.

        Raises:
            RolloutError: the sandbox broke, or there is no room for the copy.
        """
        uid = _FIRST_UID + next(_uids) % _UIDS if os.geteuid() == 0 else os.getuid()
        start = f"import sys; sys.path.insert(0, {INSIDE!r}); from agl_harnesses.inside import main; main()"
        command = [self.sandbox.python or sys.executable, "-I", "-c", start, str(uid)]
        here = {f"{INSIDE}/agl_harnesses/inside.py": inside.__file__, inside.GATEWAY: str(gateway)}
        if self.sandbox.python is None:  # an image has its own
            passwd = gateway.with_name("passwd")
            passwd.write_text(f"agent:x:{uid}:{uid}::{inside.HOME}:/bin/sh\n")
            here["/etc/passwd"] = str(passwd)
        walls = replace(self.walls, folders={**self.walls.folders, **here})

        def exchange(process: subprocess.Popen[bytes]) -> dict[str, Any]:
            assert process.stdin
            assert process.stdout
            try:
                plain.send(process.stdin.fileno(), job)
                return plain.parse(plain.receive(process.stdout.fileno(), 1 << 20))
            except (OSError, EOFError, plain.Malformed) as error:
                if ending:
                    return {"reason": "given up", "said": "", "refused": {}}
                raise self._broken(process, error) from error

        loop = asyncio.get_running_loop()
        ending = False
        # A thread of its own, as the kernel ends a sandbox with the thread that has started it.
        threads = ThreadPoolExecutor(1, "agl-harness")
        process = None
        try:
            process = await loop.run_in_executor(threads, self.sandbox.start, command, walls)
            exchanged = loop.run_in_executor(threads, exchange, process)
            while not exchanged.done():
                await asyncio.wait([exchanged], timeout=_POLL_SECONDS)
                if front.own_seconds > self.timeout + _END_SECONDS:
                    process.kill()
                elif front.own_seconds > self.timeout and not ending:
                    ending = True
                    assert process.stdin
                    process.stdin.close()
            report = await exchanged
            if ending and report.get("reason") == "given up":
                report["reason"] = f"ran for more than {self.timeout:g} s without its model"
            if report.get("status") == 0 and "reason" not in report:
                # No longer within its own time.
                await loop.run_in_executor(threads, self._unpack, process, copy, job["disk_mb"] << 20)
            return report
        finally:
            if process is not None:
                process.kill()
                # After what the thread does now has found its stream ended: nothing may be read or written later.
                await asyncio.shield(loop.run_in_executor(threads, _close, process))
            threads.shutdown(wait=False)

    def _unpack(self, process: subprocess.Popen[bytes], copy: Path, most_bytes: int) -> None:
        """Write the working copy that follows a report.

        Raises:
            LimitExceeded: this machine cannot have its files.
            RolloutError: the sandbox broke, or there is no room.
        """
        assert process.stdout
        (copy / PurePosixPath(inside.WORK).name).mkdir(parents=True)
        try:
            copies.lay_out(copies.parts(process.stdout.fileno(), most_bytes), str(copy))
        except copies.Refused as error:
            raise LimitExceeded(f"{self.harness.name} left {error}") from error
        except (EOFError, plain.Malformed) as error:
            raise self._broken(process, error) from error
        except OSError as error:
            raise RolloutError(
                f"the working copy of {self.harness.name} cannot be written: {error.strerror}",
                hint=f"nothing was graded; make room in {tempfile.gettempdir()}, or set TMPDIR",
            ) from error

    def _broken(self, process: subprocess.Popen[bytes], error: Exception) -> RolloutError:
        process.kill()
        assert process.stderr
        lines = process.stderr.read().decode(errors="replace").strip().splitlines()
        return RolloutError(
            f"the sandbox of {self.harness.name} broke: {lines[-1] if lines else error!r}",
            hint="nothing was graded; docs/security.md says what the sandboxes need",
        )


def _close(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was killed, and close its streams."""
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _how(report: Mapping[str, Any]) -> str:
    """How a coding agent ended, in words."""
    if "reason" in report:
        return report["reason"]
    status = os.waitstatus_to_exitcode(report["status"])
    return f"ended with exit status {status}" if status >= 0 else f"was ended by signal {-status}"


def _read(folder: Path, to: str) -> dict[str, str]:
    """Path -> text of the files below a folder, whose place is another one."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {f"{to}/{path.relative_to(folder)}": path.read_bytes().decode() for path in found}


def _write(folder: Path, files: Mapping[str, str], what: str) -> None:
    """Write files below a folder.

    Raises:
        ConfigError: they are no mapping of relative paths to texts.
    """
    if not isinstance(files, Mapping):
        raise ConfigError(f"agl.harness({what}...) gave a {type(files).__name__}", hint="give {path: text}")
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not isinstance(text, str):
            raise ConfigError(f"agl.harness({what}...): {name!r} is no file of it", hint="give {relative path: text}")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
