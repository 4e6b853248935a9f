"""Python programs against tests: every form of tests, and programs that cheat, hang, or eat the machine."""

from __future__ import annotations

import asyncio
import contextlib
import time
import venv
from pathlib import Path

import pytest
from sandbox import needs_a_sandbox

from agl.errors import ConfigError, RewardError
from agl.rewards import PythonTests
from agl.trainer.graders.code import program_of

needs_a_sandbox()

GRADER = PythonTests(timeout=20, cpu_seconds=1)
TASK = {"tests": ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 99"]}
GOOD = "def f(x):\n    return x + 1\n"


def test_the_share_of_tests_passed() -> None:
    assert GRADER(TASK, f"Here:\n```python\n{GOOD}```\nRun it:\n```sh\npython x.py\n```") == pytest.approx(2 / 3)
    assert GRADER.outcomes(TASK, GOOD) == ["passed", "passed", "AssertionError: "]


@pytest.mark.parametrize(
    ("task", "code", "value"),
    [
        ({"test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"}, GOOD, 1.0),
        ({"test": "def check(candidate):\n    assert candidate(1) == 3\n", "entry_point": "f"}, GOOD, 0.0),
        ({"tests": "import math\nassert f(1) < math.pi\ndef test_a():\n    assert f(0) == 2"}, GOOD, 0.5),
        (
            {"test_cases": [{"input": "1 2\n", "output": "3"}, {"input": "1 5\n", "output": "7\n"}]},
            "if __name__ == '__main__':\n    print(sum(map(int, input().split())))",
            0.5,
        ),
        ({"input_output": '{"inputs": ["3", "4"], "outputs": ["9", "16"]}'}, "print(int(input())**2); exit()", 1.0),
        ({"test_cases": [{"input": "", "output": "a\nb\n"}]}, "print('a  '); print('b'); print()", 1.0),
        ({"tests": ["assert f.__module__ == 'solution'"]}, GOOD, 1.0),
        ({"tests": ["assert sum(10, 15) == 6"]}, "def sum(a, b):\n    return 6", 1.0),
        (
            {
                "tests": ["from solution import f", "def test_f():\n    from solution import f\n    assert f(0) == 1"][
                    1:
                ]
            },
            GOOD,
            1.0,
        ),
    ],
)
def test_forms_of_tests(task: dict[str, object], code: str, value: float) -> None:
    assert GRADER(task, code) == value


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("", "no program"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(0)", "ended early"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("raise SystemExit", "SystemExit"),
        ("def f(x):\n    raise BaseException('no')", "BaseException: no"),
        ("while True: pass", "killed by SIGXCPU"),
        ("x = 'a' * 10**10", "MemoryError"),
        ("def f(x):\n    open('big', 'wb').write(bytes(100 << 20))", "OSError"),
        ("import os, signal\nos.kill(os.getppid() or -1, signal.SIGKILL)\nwhile True: pass", "killed"),
        ("import os\nprint('passed'); os.write(1, b'passed'); os.close(3)", "ended early"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    ],
)
def test_a_program_that_cheats_or_breaks_passes_nothing(code: str, outcome: str) -> None:
    outcomes = GRADER.outcomes(TASK, code)
    assert len(outcomes) == 3
    assert outcomes[0].startswith(outcome)
    assert "passed" not in outcomes


def test_what_waits_for_ever_is_ended_and_its_children_too() -> None:
    """A test that hangs ends, with all that it started; the others count."""
    code = """
import subprocess, time
def f(x):
    subprocess.Popen(["sleep", "1000.0625"], start_new_session=True)
    if x == 2:
        time.sleep(1000)
    return x + 1
"""
    assert PythonTests(timeout=5)(TASK, code) == pytest.approx(1 / 3)
    for _ in range(400):
        if not _running("sleep\x001000.0625"):
            return
        time.sleep(0.05)
    pytest.fail("what the program started still runs")


def _running(command: str) -> bool:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if process.read_text().startswith(command):
                return True
    return False


def test_time_for_all_tests_together() -> None:
    grader = PythonTests(timeout=1, total_timeout=1.5)
    outcomes = grader.outcomes(TASK, "import time\ndef f(x):\n    time.sleep(60)")
    assert outcomes[0] == "ran out of time"
    assert outcomes[-1] == "no time left"


def test_a_program_sees_no_keys_and_none_of_our_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    code = """
import os, sys
text = str(dict(os.environ)) + str(sys.path)
def f(x):
    assert os.getcwd() == os.environ["HOME"] != ""
    return "sk-secret" not in text and "/nowhere" not in text and os.listdir() == []
"""
    assert GRADER({"tests": ["assert f(1)"]}, code) == 1.0


def test_a_program_is_not_told_what_is_expected() -> None:
    code = """
import os, sys
def f(x):
    seen = repr([globals(), vars(sys.modules["__main__"]), dict(os.environ), sys.argv])
    expected = str(918272 + 1)
    return int(expected) if expected in seen else 0
"""
    assert GRADER({"tests": ["assert f(1) == 918273"]}, code) == 0.0


def test_tests_do_not_disturb_one_another() -> None:
    task = {"tests": ["assert f() == 1", "assert f() == 1"]}
    assert GRADER(task, "calls = []\ndef f():\n    calls.append(1)\n    return len(calls)") == 1.0


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert GRADER({"tests": ["assert f(1) == 2"]}, GOOD + "open('mine', 'w').write('x')") == 1.0
    assert list(tmp_path.iterdir()) == []


def test_many_at_once_from_an_event_loop() -> None:
    async def together() -> list[float]:
        task = {"tests": ["assert f(1) == 2"]}
        return await asyncio.gather(*(GRADER.call_async(task, f"def f(x): return x + {i % 2}") for i in range(8)))

    assert asyncio.run(together()) == [0.0, 1.0] * 4


def test_what_is_not_the_agents_fault_is_an_error() -> None:
    with pytest.raises(RewardError, match="finds no reference in the task"):
        GRADER({"question": "q"}, GOOD)
    with pytest.raises(RewardError, match="cannot read the task's tests: it holds no assert"):
        GRADER({"tests": "x = 1"}, GOOD)
    with pytest.raises(RewardError, match="cannot read the task's tests: invalid syntax"):
        GRADER({"tests": "assert ("[:-1] + "= 1"}, GOOD)
    with pytest.raises(RewardError, match="finds no test"):
        GRADER({"tests": []}, GOOD)
    with pytest.raises(RewardError, match="cannot start"):
        PythonTests(python="/nowhere/python")(TASK, GOOD)
    with pytest.raises(ConfigError, match="memory_mb=0"):
        PythonTests(memory_mb=0)


def test_the_interpreter_of_the_programs_needs_no_package(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    assert PythonTests(python=str(tmp_path / "bin/python"))(TASK, GOOD) == pytest.approx(2 / 3)


def test_the_program_in_a_text() -> None:
    assert program_of("x = 1") == "x = 1"
    assert program_of("```\na\n```\nand\n```\nb\n```") == "b\n"
    assert program_of("```py\na\n```\nprints\n```text\nb\n```") == "a\n"
