"""examples/calc_x: its problems, its reward, its calculator over MCP, and its agent in both frameworks."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import real_data

import agl
from agl.errors import DatasetError
from agl.testing.provider import Script, says, serve

pytest.importorskip("agent_framework")
pytest.importorskip("agent_framework_openai")
pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext")
pytest.importorskip("mcp")
pytest.importorskip("math_verify")

from examples.calc_x import __main__ as example
from examples.calc_x import calculator
from examples.calc_x.agent import FRAMEWORKS, build
from examples.calc_x.scripts import beginner, oracle
from examples.calc_x.server import calculate
from examples.calc_x.tasks import Task, generated, load, reward, understood


def success(script: Script, tasks: list[Task], where: Path, **options: Any) -> float:
    """The agent's mean reward over real HTTP, and the real calculator."""
    with serve(script) as provider:
        agent = agl.wrap(build(provider.url, "m", "none", **options), reward=reward, name="MathAgent")
        report = agl.evaluate(agent, tasks, {"scripted": None}, directory=where, n_workers=8, progress=False)
    (policy,) = report.policies.values()
    assert policy.failed == 0
    return policy.success.value


# -- the agent ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_oracle_solves_every_problem_and_a_null_agent_none(framework: str, tmp_path: Path) -> None:
    tasks = generated(16, seed=3) + generated(8, seed=3, held_out=True)
    assert success(oracle, tasks, tmp_path / "oracle", framework=framework) == 1.0
    assert success(says("### I do not know"), tasks, tmp_path / "null", framework=framework) == 0.0


@pytest.mark.night
def test_the_beginner_errs_mostly_and_is_the_same_again(tmp_path: Path) -> None:
    tasks = generated(96, seed=3)
    rates = [success(beginner, tasks, tmp_path / str(i)) for i in range(2)]
    assert rates[0] == rates[1]
    assert 0.1 < rates[0] < 0.4


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_server_for_each_rollout_ends_with_it(framework: str, tmp_path: Path) -> None:
    tasks = generated(2, seed=5)
    assert success(oracle, tasks, tmp_path, framework=framework, server_per_rollout=True) == 1.0
    calculator.shared().close()
    assert servers() == []


def test_a_dry_run_tells_three_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--tiny", "--debug", "--out", str(tmp_path)]) is None
    told = capsys.readouterr().out
    assert told.count("\nreward 1.0") == 3
    assert "execute_tool calculator" in told


# -- problems and reward -----------------------------------------------------------------------------------------------


def test_no_problem_of_training_has_the_numbers_of_a_held_out_one() -> None:
    def numbers(held_out: bool) -> set[tuple[str, ...]]:
        return {
            tuple(re.findall(r"\d+", t["question"]))
            for seed in range(3)
            for t in generated(600, seed=seed, held_out=held_out)
        }

    assert not numbers(True) & numbers(False)


def test_a_step_takes_the_result_of_the_one_before() -> None:
    for task in generated(300, seed=1):
        outputs = re.findall(r"<output>(.*)</output>", task["chain"])
        expressions = re.findall(r">(\d+ . \d+)</gadget>", task["chain"])
        assert [calculate(e) for e in expressions] == outputs
        assert [e.split()[0] for e in expressions[1:]] == outputs[:-1]
        assert outputs[-1] == task["result"]
        assert understood(task["question"]) is not None


@pytest.mark.parametrize(
    ("answer", "result", "right"),
    [
        ("So it is ### 4.0", "4", 1), ("### 0.67", "2/3", 1), ("### 2/3 = around 0.666667", "2/3", 1),
        ("### 3 ###", "3", 1),
        ("### 1050", "1_050", 1), ("### $1,050.", "1_050", 1), (r"### \frac{2}{3}", "2/3", 1), ("### 2 1/3", "7/3", 1),
        ("### B", "B", 1), ("### (B)", "B", 1), ("### 50%", "1/2", 1), ("### 1\n### 2", "2", 1),
        ("12", "12", 0), ("### A", "B", 0), ("### 11", "12", 0), ("### ten", "10", 0), ("###", "10", 0),
        ("### 1/0", "3", 0),
        ("### 9**9**9", "12", 0), (f"### {'9' * 6000}", "12", 0), (None, "12", 0),
    ],
)  # fmt: skip
def test_answers_are_compared_as_numbers(answer: Any, result: str, right: int) -> None:
    assert asyncio.run(reward({"result": result}, answer)) == right


def test_calc_x_as_it_is() -> None:
    """Each row's own result is right, another row's is not, and our calculator agrees with the chains' results."""
    folder = real_data.folder("calc_x")
    train, test = load(folder / "train.jsonl"), load(folder / "test.jsonl")
    assert (len(train), len(test)) == (64, 20)
    assert not {t["question"] for t in train} & {t["question"] for t in test}
    rows = train + test

    async def grades(shift: int) -> list[float]:
        results = [rows[(i + shift) % len(rows)]["result"] for i in range(len(rows))]
        return [await reward(row, f"### {result}") for row, result in zip(rows, results, strict=True)]

    assert asyncio.run(grades(0)) == [1.0] * len(rows)
    assert sum(asyncio.run(grades(1))) < 5
    agreed = [
        asyncio.run(reward({"result": output}, f"### {calculate(expression)}"))
        for row in rows
        for expression, output in re.findall(
            r'<gadget id="calculator">(.*?)</gadget>\s*<output>(.*?)</output>', row["chain"]
        )
    ]
    assert sum(agreed) / len(agreed) > 0.95


def test_what_is_no_calc_x_is_said(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot read Calc-X"):
        load(tmp_path / "none.jsonl")
    (tmp_path / "other.jsonl").write_text('{"question": "1+1?"}\n')
    with pytest.raises(DatasetError, match="no record of Calc-X"):
        load(tmp_path / "other.jsonl")


# -- the calculator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2", "14"), ("0.1 + 0.2", "0.3"), ("2 / 3", "2/3 = around 0.666667"), ("1_050 * 2", "2100"),
        ("-3 % 7", "4"),
        ("7 // 2", "3"), ("2^10", "1024"), ("6 × 7 ÷ 2", "21"), ("4 ** 0.5", "2"),
    ],
)  # fmt: skip
def test_arithmetic_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "9**-9**9", "10**60*10**60", "1/0", "0**-1", "23 14", "", "x", "__import__('os')", "'a'*9", "True",
        "[1]", "1" * 201, "(" * 150, "-" * 199 + "1", "1e999", "(-8)**(1/3)", "\0",
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_at_once(expression: str) -> None:
    before = time.process_time()
    answer = calculate(expression)
    assert answer.startswith("error: ") or expression.startswith("-"), answer
    assert time.process_time() - before < 1


def servers() -> list[psutil.Process]:
    return [
        p
        for p in psutil.Process().children(recursive=True)
        if any(Path(word).name == "server.py" for word in p.cmdline())
    ]


def test_one_server_for_many_event_loops_and_another_when_it_dies() -> None:
    server, others = calculator.Calculator(), servers()

    async def many() -> list[str]:
        return await asyncio.gather(*(server.calculate(f"{i} * 2") for i in range(50)))

    try:
        for _ in range(2):
            assert asyncio.run(many()) == [str(2 * i) for i in range(50)]
        assert server.starts == 1
        (process,) = (p for p in servers() if p not in others)
        process.kill()
        assert asyncio.run(many())[3] == "6"
        assert server.starts == 2
    finally:
        server.close()
    assert servers() == others


BLOCKED = """
import time
from mcp.server import MCPServer
server = MCPServer("blocked")
@server.tool()
def calculate(expression: str) -> str:
    if "**" in expression:
        time.sleep(600)
    return "4"
server.run("stdio")
"""


def test_a_server_that_blocks_is_replaced(tmp_path: Path) -> None:
    """As the calculators that one finds do on 9**9**9: the model is told, and the next call has a new server."""
    (tmp_path / "server.py").write_text(BLOCKED)
    others = servers()
    server = calculator.Calculator(arguments=[str(tmp_path / "server.py")], tool="calculate", seconds=2)
    try:
        assert asyncio.run(server.calculate("9**9**9")) == "error: no answer within 2 s"
        assert asyncio.run(server.calculate("2+2")) == "4"
        assert server.starts == 2
    finally:
        server.close()
    assert servers() == others
