"""What all examples share, and the two that need no test file of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("langgraph")

from examples import tables
from examples.distil_then_reinforce.__main__ import main as distil_then_reinforce
from examples.prompts.__main__ import main as prompts
from examples.prompts.tasks import grade, tickets


def test_the_tables_are_those_of_the_results() -> None:
    for file, text in tables.written().items():
        assert file.read_text("utf-8") == text, f"{file} is not what python -m examples.tables writes"


def test_the_splits_of_the_tickets_are_disjoint() -> None:
    numbers = [{t["number"] for t in tickets(100, seed=0, split=split)} for split in ("train", "val", "held out")]
    assert not numbers[0] & numbers[1]
    assert not numbers[0] & numbers[2]
    assert not numbers[1] & numbers[2]


def test_tickets_are_graded_rule_by_rule() -> None:
    [task] = tickets(1, seed=0, split="train")
    right = {"sorted": f"{task['queue']} {task['urgency']}", "answer": f"We look at {task['number']}."}
    assert set(grade(task, right).values()) == {1.0}
    assert set(grade(task, {"sorted": "", "answer": "We answer today."}).values()) == {0.0}


@pytest.mark.night
@pytest.mark.slow
def test_prompts_are_found(tmp_path: Path) -> None:
    result = prompts(["--tiny", "--out", str(tmp_path / "out")])
    assert result is not None
    before, after = (result["policies"][name]["success"] for name in ("before", "after"))
    assert before["high"] < 0.1
    assert after["low"] > 0.9


@pytest.mark.parametrize("main", [prompts, distil_then_reinforce])
def test_three_tasks_are_told(main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--debug", "--out", str(tmp_path)]) is None
    told = capsys.readouterr().out
    assert told.count("== task") == 3
    assert told.count("reward ") >= 3


@pytest.mark.night
@pytest.mark.slow
def test_a_student_is_distilled_then_reinforced(tmp_path: Path) -> None:
    result = distil_then_reinforce(["--tiny", "--short", "--out", str(tmp_path / "out")])
    assert result is not None
    success = {name: policy["success"] for name, policy in result["policies"].items()}
    assert success["strong"]["value"] == 1.0
    assert success["before"]["value"] == 0.0
    assert success["after"]["low"] > 0.3
