"""The grader of Python programs: the share of tests that a program passes, behind walls and within limits."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl.errors import ConfigError
from agl.options import checked_options
from agl.rewards.trace import Trace
from agl.trainer.graders.base import Grader
from agl.trainer.graders.fences import fenced
from agl.trainer.graders.fields import Field, extract, failure, lookup, reference, text_of
from agl.trainer.graders.programs.running import Unusable, outcomes, pool
from agl.trainer.processes.sandbox import Sandbox
from agl.trainer.processes.sandboxes import chosen

TEST_FIELDS = ("tests", "test_list", "test_cases", "test", "input_output")
"""Fields of a dict task that hold the tests, in order of preference."""

_MOST_CHARACTERS = 200_000
_AT_ONCE = threading.BoundedSemaphore(os.cpu_count() or 1)

log = logging.getLogger("agl")


@checked_options
@dataclass(frozen=True, kw_only=True)
class PythonTests(Grader):
    """The share of the task's tests that the output's program passes, 0 to 1.

    The program is the output's last code block, or all of it. Each test runs the program again in a new process, within
    limits of processor time, memory, file size and processes; at the end of its time all that it started is killed.
    What it is compared with is never in that process: tests run in another, which sends the program's functions their
    arguments and gets plain data back (numbers, texts, bytes, lists, tuples, sets, dicts, dates, Decimal, Fraction) or
    objects that it can only ask for items and attributes. What is of a subclass of those arrives as the base class.

    The program runs in a sandbox, without network, other processes and the user's files, and so do the tests, in
    another. What a test evaluates or unpickles (`eval`, `exec`, `pickle.loads`), the program's process evaluates.

    Tests are Python (a text or a list of texts: each top-level `assert` and each `test_*` function is one;
    `check(candidate)` with the task's `entry_point`, as in HumanEval), or pairs of standard input and output
    ({"input", "output"}, a list of them, or {"inputs": [...], "outputs": [...]}). A name that tests neither define nor
    import is the program's; builtin functions are not, but for the tested one. Needs a POSIX system.

    Attributes:
        tests: the field of the task that holds them; the first present of "tests", "test_list", "test_cases", "test",
            "input_output" if None.
        entry_point: the field of the task that holds the name of the tested function.
        timeout: wall-clock seconds for a test, which also end a program that sleeps or waits.
        cpu_seconds: seconds of processor time for a test.
        total_timeout: seconds for all tests; those that do not start in time are not passed.
        memory_mb, file_mb: MiB of address space of a process and of memory of all, and of the largest file.
        processes: additional processes and threads of the program.
        python: the interpreter; the current one, or a container's own, if None.
        isolation: "bubblewrap", "podman", "docker", the first that works if "auto"; "e2b", "daytona"; or a sandbox, as
            `agl.rewards.Container("docker", image=...)`. "none" has no walls: only for models that you trust.
    """

    waits = True

    tests: Field | None = None
    entry_point: str = "entry_point"
    timeout: float = 10.0
    cpu_seconds: int = 5
    total_timeout: float = 60.0
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 64
    python: str | None = None
    isolation: str | Sandbox = "auto"

    def __post_init__(self) -> None:
        for name in ("timeout", "cpu_seconds", "total_timeout", "memory_mb", "file_mb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"PythonTests({name}={getattr(self, name)!r})", hint="give more than 0")
        chosen(self.isolation)

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """Passed tests over all tests.

        Raises:
            RewardError: no readable test, or no process to run the tests in.
            ConfigError: the sandbox does not work here.
        """
        outcomes = self._outcomes(task, output)
        return outcomes.count("passed") / len(outcomes)

    def outcomes(self, task: Any, output: Any) -> list[str]:
        """For each test "passed", or the reason why it failed."""
        return self._outcomes(task, extract(output, self.output))

    def _outcomes(self, task: Any, output: Any) -> list[str]:
        tests = self._tests(task)
        code = program_of(text_of(output))
        if not code.strip() or len(code) > _MOST_CHARACTERS:
            return ["no program" if not code.strip() else "too long a program"] * len(tests)
        return self._run(tests, code.encode(errors="replace").decode())

    def _run(self, tests: list[dict[str, Any]], code: str) -> list[str]:
        job = {name: getattr(self, name) for name in ("timeout", "total_timeout", "memory_mb", "file_mb", "processes")}
        job |= {"code": code, "tests": tests, "cpu_seconds": max(1, round(self.cpu_seconds))}
        sandbox = chosen(self.isolation)
        _log_isolation(sandbox.name)
        try:
            walls = (self.memory_mb, self.file_mb, self.processes)
            with _AT_ONCE:
                return outcomes(pool(sandbox, self.python or sys.executable, *walls, os.getpid()), job)
        except Unusable as error:
            raise failure(f"{self.label} cannot run the task's tests: {error}") from error

    def _tests(self, task: Any) -> list[dict[str, Any]]:
        where = self.tests
        if where is None and isinstance(task, Mapping):
            where = next((name for name in TEST_FIELDS if name in task), TEST_FIELDS[0])
        value = reference(task, where, self.label)
        entry = lookup(task, self.entry_point)
        try:
            tests = _read(value, entry if isinstance(entry, str) else None)
        except (SyntaxError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise failure(
                f"{self.label} cannot read the task's tests: {error}",
                hint="tests= names the task's field: Python with asserts, or pairs of input and output",
            ) from error
        if not tests:
            raise failure(f"{self.label} finds no test in the task", hint="give at least one")
        prompt = task.get("prompt") if isinstance(task, Mapping) else None
        helpers = _helpers(prompt, entry) if isinstance(prompt, str) else ""
        return [test | {"code": f"{helpers}\n{test['code']}"} if test.get("argument") else test for test in tests]


def program_of(text: str) -> str:
    """The program in a text: its last code block of Python, else its last code block, else all of it."""
    blocks = fenced(text)
    python = [
        code for info, code in blocks if re.split(r"\W", info.lower(), maxsplit=1)[0] in ("python", "py", "python3")
    ]
    return python[-1] if python else blocks[-1][1] if blocks else text


def _read(value: Any, entry_point: str | None) -> list[dict[str, Any]]:
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            parsed = json.loads(value)
            if isinstance(parsed, dict | list):
                return _read(parsed, entry_point)
        return split(value, entry_point)
    if isinstance(value, Mapping):
        if "inputs" in value:
            pairs = zip(value["inputs"], value["outputs"], strict=True)
            return [_stdin(stdin, stdout) for stdin, stdout in pairs]
        return [_stdin(value["input"], value["output"])]
    if isinstance(value, Sequence):
        return [test for one in value for test in _read(one, entry_point)]
    raise TypeError(f"a {type(value).__name__}")


def split(source: str, entry_point: str | None) -> list[dict[str, Any]]:
    """The tests in a text of Python: `check(candidate)`, else each top-level `assert` and `test_*` function.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it holds no test.
    """
    tree = ast.parse(source)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "check" in names and entry_point:
        return [{"kind": "python", "code": source, "call": "check", "argument": entry_point}]
    setup = [node for node in tree.body if not isinstance(node, ast.Assert)]
    common = "\n".join(ast.unparse(node) for node in setup)
    tests: list[dict[str, Any]] = []
    for node in tree.body:
        if isinstance(node, ast.Assert):
            tests.append({"kind": "python", "code": f"{common}\n{ast.unparse(node)}", "call": None})
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            tests.append({"kind": "python", "code": common, "call": node.name})
    if not tests:
        raise ValueError("it holds no assert, no test_* function, and no check() with an entry point")
    return tests


def _helpers(prompt: str, entry_point: str) -> str:
    """The functions besides the tested one that a prompt gives, as in HumanEval: tests that use them use these."""
    try:
        body = ast.parse(prompt).body
    except (SyntaxError, ValueError, RecursionError):
        return ""
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef
    return "\n".join(ast.unparse(n) for n in body if isinstance(n, kinds) and getattr(n, "name", "") != entry_point)


def _stdin(stdin: Any, stdout: Any) -> dict[str, Any]:
    text, output = ("\n".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for v in (stdin, stdout))
    return {"kind": "stdin", "input": text, "output": output}


@functools.cache
def _log_isolation(name: str) -> None:
    """Say once what stands between a graded program and this machine."""
    if name == "none":
        log.warning("PythonTests: programs run without walls, as this user: they can read its files, use the network")
    else:
        log.info("PythonTests: programs run in sandboxes of %s: no network, no files or processes but their own", name)
