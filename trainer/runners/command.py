"""An agent in any language: one process per rollout, which gets the task as JSON on stdin and prints its output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from agl import tracing
from agl.agents.agent import Agent, RewardFunction, scored
from agl.errors import ConfigError
from agl.tracing import propagation
from agl.trainer.processes.environment import Variables, child_environment, hide_process, values_of

MAX_OUTPUT_BYTES = 16 * 1024 * 1024
_SHOWN_BYTES = 4000
"""Bytes from the end of stderr that an error shows."""


class CommandFailed(Exception):
    """The command could not be run, or ended with a status other than 0.

    Attributes:
        cause: as `agl.agents.causes.answer_error_cause` gives it: None, since no more is known of a program in
            another language than that it failed.
    """

    cause: ClassVar[str | None] = None


class CommandAgent(Agent):
    """A command as an agent: `agl.CommandAgent(["node", "agent.mjs"], reward=score)`.

    For each rollout the command runs once, in a separate process group that ends with it. It gets the task as JSON on
    stdin and in AGL_TASK; its stdout, without surrounding white space, is its output. OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY point its clients at the policy, as one agent of this name. Of this
    process's environment it gets what `trainer/processes/environment.py` allows (PATH, HOME, proxies, ...) and what
    `env` names. An agent that is not trained needs its provider's key so: `env=["OPENAI_API_KEY"]`. Its calls pass a
    proxy on loopback, where they are recorded and its system prompt may be replaced; the key stays the command's.

    Args:
        command: the program and its arguments; no shell is involved.
        reward: (task, output) -> float or dict of floats; None = another one, `Trainer(group_reward=)`.
        name: the agent's name; that of the script, module (`python -m pkg.agent`) or program if None.
        cwd: its working directory.
        env: variables added to its environment: {name: value}, or names of those that are passed on from this process.
        error_reward: the reward of a run that ended with a status other than 0; None = retried, then dropped.

    Raises:
        ConfigError: an empty command, or `env` names no variables.
    """

    sub_agents: ClassVar[bool] = False
    """Whether there may be others beside it, which no policy answers though one answers it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        reward: RewardFunction | None,
        name: str | None = None,
        cwd: str | Path | None = None,
        env: Variables | None = None,
        error_reward: float | None = None,
    ) -> None:
        words = [command] if isinstance(command, str) else [str(word) for word in command]
        if not words or not words[0]:
            raise ConfigError("the command is empty", hint='for example agl.CommandAgent(["node", "agent.mjs"], ...)')
        if isinstance(command, str) and " " in command:
            raise ConfigError(f"the command is {command!r}, one word", hint="give its words: shlex.split(command)")
        agent_name = name or program_name(words)
        variables = env if isinstance(env, Mapping | str) else tuple(env or ())
        values_of(variables)

        async def invoke(task: Any) -> str:
            return await _output(words, agent_name, task, cwd, variables)

        agent = scored(agent_name, invoke, reward, error_reward=error_reward)
        super().__init__(agent.name, agent.run, agent.is_async, agent.tracers, agent.error_reward)


def program_name(command: Sequence[str]) -> str:
    """The name of a command: that of the script or module if an interpreter runs one, else the program's."""
    module = None
    words = iter(command[1:])
    for word in words:
        if _TAKES_TEXT.fullmatch(word):
            # Code, or a setting: its words are no script's, and in a URL its lines would match no route.
            next(words, None)
        elif (option := _MODULE.fullmatch(word)) and _PYTHON.match(Path(command[0]).name):
            module = option[1] or next(words, None) or module
        elif not word.startswith("-") and word.isprintable() and not _IS_NO_FILE.match(word):
            # A module may run a script (`-m coverage run agent.py`); other files are its data.
            script = Path(word)
            if script.suffix[1:2].isalpha() and (module is None or script.suffix == ".py"):
                return script.stem
    return module or _launched(command) or Path(command[0]).stem


def _launched(command: Sequence[str]) -> str | None:
    """What a package manager runs: `uvx my-agent`, `npm run writer`; None where options stand before it."""
    if Path(command[0]).stem not in _LAUNCHERS:
        return None
    words = list(itertools.dropwhile(_RUNS.__contains__, command[1:]))
    name = Path(words[0]).name if words else ""
    return name if name.isprintable() and not name.startswith("-") else None


_TAKES_TEXT = re.compile(r"-[a-zA-Z]*[ce]|-[prWX]|--(command|eval|print|require|import|loader|env|env-file|tsconfig)")
"""Options of interpreters before code, settings, or a file that is not the program."""
_MODULE = re.compile(r"-[bBdEhiIOPqsSuvx]*m(.*)", re.S)
"""Python's option before a module, by itself or after others: `-Im`."""
_LAUNCHERS = frozenset(
    {"uv", "uvx", "pipx", "poetry", "pipenv", "pdm", "hatch", "npm", "npx", "pnpm", "yarn", "bun", "bunx"}
)
_RUNS = frozenset({"run", "exec", "dlx", "x", "tool", "run-script"})
"""Their words before what they run."""
_PYTHON = re.compile(r"py|uv|poetry|pipenv|hatch|coverage|env|nice|time", re.ASCII)
"""Programs, by the beginning of their names, of which `-m` names a Python module, or which run such a program."""
_IS_NO_FILE = re.compile(r"\w+=|\w+://", re.ASCII)
"""Words that look like files: settings (`FOO=a.b`) and addresses."""


async def _output(command: Sequence[str], name: str, task: Any, cwd: str | Path | None, env: Variables) -> str:
    environment = _environment(name, task, env)
    # What this process holds is not the command's: keys, and the environment that it is not given.
    hide_process()
    with _file(json.dumps(task).encode()) as stdin, _file() as stdout, _file() as stderr:
        # Files, not pipes: a process that the command leaves behind cannot block us.
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandFailed(f"{command[0]!r} cannot be run: {error.strerror}") from error
        try:
            status = await process.wait()
        finally:
            # Also ends what the command started, and ends it on a time-out.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status != 0:
            how = f"ended with exit status {status}" if status > 0 else f"was ended by signal {-status}"
            text = _tail(stderr)
            missing = sorted(n for n in os.environ if n not in environment and re.search(rf"\b{re.escape(n)}\b", text))
            if missing:
                text += f"\n{', '.join(missing)}: set here, but passed on to a command only by env={missing}"
            raise CommandFailed(f"{command[0]!r} {how}" + (f"; its stderr:\n{text}" if text else ""))
        size = stdout.seek(0, os.SEEK_END)
        if size > MAX_OUTPUT_BYTES:
            raise CommandFailed(f"{command[0]!r} wrote {size} bytes to stdout; the limit is {MAX_OUTPUT_BYTES}")
        stdout.seek(0)
        return stdout.read().decode(errors="replace").strip()


def _environment(name: str, task: Any, env: Variables) -> dict[str, str]:
    environment = child_environment(env)
    scope = tracing.current()
    if scope is None:
        return environment
    rollout = scope.rollout
    environment |= propagation.attempt_variables(rollout.rollout_id, rollout.attempt, task)
    if rollout.gateway_url is not None and rollout.selection.policy_for(name) is not None:
        url = f"{rollout.gateway_url}/rollouts/{rollout.rollout_id}/attempts/{rollout.attempt}"
        environment |= propagation.gateway_variables(url, name, rollout.key, environment)
        environment |= propagation.without_proxy(environment)
    elif rollout.recorder is not None:
        environment |= rollout.recorder(name, environment)
        environment |= propagation.without_proxy(environment)
    return environment


def _file(content: bytes = b"") -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _SHOWN_BYTES))
    return file.read().decode(errors="replace").strip()
