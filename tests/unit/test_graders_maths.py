"""Maths answers: every answer of two real datasets, notations, garbage, and expressions that would never end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_data import jsonl

from agl.errors import ConfigError, RewardError
from agl.rewards import MathAnswer
from agl.trainer.graders.maths import _workers

GRADER = MathAnswer()


@pytest.mark.slow
def test_every_gsm8k_answer_is_its_own_and_not_another() -> None:
    for task in jsonl("gsm8k/test.jsonl"):
        gold = task["answer"].rpartition("####")[2].strip()
        assert GRADER(task, task["answer"]) == 1.0
        assert GRADER(task, f"So the answer is $\\boxed{{{gold}}}$.") == 1.0
        assert GRADER(task, f"The answer is {gold.replace(',', '')}7") == 0.0


def test_every_calc_x_result_is_that_of_its_chain() -> None:
    for task in jsonl("calc_x/train.jsonl") + jsonl("calc_x/test.jsonl"):
        said = task["chain"].rpartition("<result>")[2].partition("</result>")[0]
        assert GRADER(task, said) == 1.0, task
        assert GRADER(task, "-987654321") == 0.0


@pytest.mark.parametrize(
    ("gold", "said"),
    [
        ("18", "She makes $18 a day."), ("1/2", "\\boxed{\\frac{1}{2}}"), ("0.5", "50%"), ("1,234", "1234"),
        ("7/3", "2 1/3"), ("100000", "1e5"), ("1088", "1_088"), ("x^2+2x+1", "$(x+1)^2$"), ("42", "#### 42"),
        ("#### 42", "\\boxed{42}"), ("2/5 = around 0.4", "0.4"), ("B", "The answer is B."), ("B", "(B)"),
        ("\\frac{3\\pi}{4}", "#### \\frac{3}{4}\\pi"),
        ("\\frac{3\\pi}{4}", "\\boxed{\\frac34\\pi}"), ("x \\in [1,2)", "$[1,2)$"),
        ("x = 5", "$x=5$"),
        ("(1, 2)", "the point $(1,2)$"), ("-3", "\\boxed{-3}"), ("x", "$x$"),
    ],
)  # fmt: skip
def test_the_same_however_it_is_written(gold: str, said: str) -> None:
    assert GRADER({"answer": gold}, said) == 1.0


@pytest.mark.parametrize(("gold", "said"), [("18", "19"), ("B", "A"), ("18", ""), ("18", "no idea"), ("1/3", "0.33")])
def test_what_differs_is_wrong(gold: str, said: str) -> None:
    assert GRADER({"answer": gold}, said) == 0.0


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80) | st.text(st.sampled_from("\\{}$^_()[]1x+-/%.,frac sqrt"), max_size=40))
def test_garbage_is_a_wrong_answer_and_never_an_error(said: str) -> None:
    assert MathAnswer(timeout=0.5)({"answer": "918273645"}, said) == 0.0


@pytest.mark.parametrize(
    "said",
    ["$9^{9^{9^{9}}}$", "$3^{1000000007}$", "\\boxed{(10^{10^{10}})!}", "$99999999999^{99999999999}$", "(" * 9000],
)
def test_an_expression_without_end_is_a_wrong_answer(said: str) -> None:
    assert MathAnswer(timeout=0.3)({"answer": "18"}, said) == 0.0
    assert GRADER({"answer": "18"}, "18") == 1.0


def test_from_many_threads_and_from_an_event_loop() -> None:
    def grade(i: int) -> float:
        assert threading.current_thread() is not threading.main_thread()
        return GRADER({"answer": str(i)}, f"\\boxed{{{i}}}")

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(grade, range(100))) == [1.0] * 100

    async def together() -> list[float]:
        return await asyncio.gather(*(GRADER.call_async({"answer": "3"}, f"{i % 4}") for i in range(40)))

    assert asyncio.run(together()) == [0.0, 0.0, 0.0, 1.0] * 10


def test_a_dead_worker_is_replaced() -> None:
    assert GRADER({"answer": "1"}, "1") == 1.0
    for worker in list(_workers()._idle.queue):
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    assert GRADER({"answer": "1"}, "1") == 1.0


def test_a_reference_that_is_no_mathematics_is_an_error() -> None:
    with pytest.raises(RewardError, match="no mathematical answer in the reference 'blue'"):
        GRADER({"answer": "blue"}, "blue")
    with pytest.raises(ConfigError, match="timeout=0"):
        MathAnswer(timeout=0)


def test_the_worker_script_ends_with_its_input() -> None:
    job = {"references": ["2"], "answer": "2.0", "float_rounding": 6, "strict": True, "limit": 5}
    done = subprocess.run(
        [sys.executable, "-c", "from agl.trainer.graders.maths_worker import main; main()"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["ready", '{"equal": true}']
