"""The grader of Python programs: the share of tests that a program passes, in a subprocess with limits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl.errors import ConfigError, checked_options
from agl.rewards.graders.base import Grader
from agl.rewards.graders.code_driver import split
from agl.rewards.graders.fields import Field, extract, failure, lookup, reference, text_of
from agl.rewards.trace import Trace

TEST_FIELDS = ("tests", "test_list", "test_cases", "test", "input_output")
"""Fields of a dict task that hold the tests, in order of preference."""

_FENCED = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.S)
_MOST_CHARACTERS = 200_000
_START_SECONDS = 60.0
_at_once = threading.BoundedSemaphore(os.cpu_count() or 1)


@checked_options
@dataclass(frozen=True, kw_only=True)
class PythonTests(Grader):
    """The share of the task's tests that the output's program passes, 0 to 1.

    The program is the output's last code block, or all of it. Each test runs the program again in a separate process:
    in a temporary folder, with an empty environment (no keys), isolated from user packages, within limits of processor
    time, memory, file size and processes. At the end of its time its processes are killed.

    This bounds accidents. It is not a security sandbox: the program runs as this user, and may read files and use the
    network. If the model is not trusted, run the trainer in a container, or grade in a sandbox service.

    Tests are Python (a text or a list of texts: each top-level `assert` and each `test_*` function is one;
    `check(candidate)` with the task's `entry_point`, as in HumanEval), or pairs of standard input and output
    ({"input", "output"}, a list of them, or {"inputs": [...], "outputs": [...]}). Needs a POSIX system.

    Attributes:
        tests: the field of the task that holds them; the first present of "tests", "test_list", "test_cases", "test",
            "input_output" if None.
        entry_point: the field of the task that holds the name of the tested function.
        timeout: wall-clock seconds for a test, which also end a program that sleeps or waits.
        cpu_seconds: seconds of processor time for a test.
        total_timeout: seconds for all tests; those that do not start in time are not passed.
        memory_mb, file_mb: MiB of address space, and of the largest file.
        processes: additional processes and threads of the program; the superuser is not limited.
        python: the interpreter; the current one if None.
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

    def __post_init__(self) -> None:
        for name in ("timeout", "cpu_seconds", "total_timeout", "memory_mb", "file_mb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"PythonTests({name}={getattr(self, name)!r})", hint="give more than 0")

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """Passed tests over all tests.

        Raises:
            RewardError: no readable test, or no process to run the tests in.
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
        job = {
            "code": code.encode(errors="replace").decode(),
            "tests": tests,
            "timeout": self.timeout,
            "total_timeout": self.total_timeout,
            "cpu_seconds": max(1, round(self.cpu_seconds)),
            "memory_mb": self.memory_mb,
            "file_mb": self.file_mb,
            "processes": self.processes,
        }
        with _at_once, tempfile.TemporaryDirectory(prefix="agl-tests-", ignore_cleanup_errors=True) as folder:
            report = self._run(job, folder)
        if len(report) != len(tests):  # the program killed its driver
            return ["ended the run"] * len(tests)
        return report

    def _run(self, job: Mapping[str, Any], folder: str) -> list[str]:
        try:
            process = subprocess.Popen(
                [self.python or sys.executable, "-I", str(Path(__file__).with_name("code_driver.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,
            )
        except OSError as error:
            raise failure(f"cannot start {self.python or sys.executable!r} to run tests: {error}") from error
        try:
            output, errors = process.communicate(json.dumps(job).encode(), self.total_timeout + _START_SECONDS)
        except subprocess.TimeoutExpired:
            return []
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if process.returncode > 0:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise failure(f"the process that runs tests failed: {' '.join(last)}")
        return json.loads(output) if output else []

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
                hint="tests= says where they are: Python with asserts, or pairs of input and output",
            ) from error
        if not tests:
            raise failure(f"{self.label} finds no test in the task", hint="give at least one")
        return tests


def program_of(text: str) -> str:
    """The program in a text: its last code block of Python, else its last code block, else all of it."""
    blocks = _FENCED.findall(text)
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
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


def _stdin(stdin: Any, stdout: Any) -> dict[str, Any]:
    text, output = ("\n".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for v in (stdin, stdout))
    return {"kind": "stdin", "input": text, "output": output}


def _environment(folder: str) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return inherited | {
        "PATH": os.defpath,
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
