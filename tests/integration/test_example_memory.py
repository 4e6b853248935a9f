"""examples/memory: its scripts score what they must with the real agent, and what it shows cannot be had otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agl
from agl.testing.provider import Script, says, serve
from examples.memory import __main__ as program
from examples.memory.agent import build
from examples.memory.scripts import beginner, oracle
from examples.memory.tasks import CHANCE, DRINKS, NOTED, reward, shop

FACTS = shop(0)


def success(script: Script, tasks: list[Any], directory: Path, memory: agl.Memory | None = None) -> list[float]:
    """Of each mode of the memory; once without one."""
    recall = agl.memory.tools(k=1)[:1]
    with serve(script) as provider:
        use = None if memory is None else memory.per("agent")
        agent = agl.wrap(build(provider.url, "m", "none", recall), reward=reward, memory=use)
        report = agl.evaluate(agent, tasks, directory=directory, n_workers=16, progress=False)
    return [policy.success.value for policy in report.policies.values()]


def test_the_oracle_knows_with_its_memory_alone(tmp_path: Path) -> None:
    """On: all. Off and shuffled: chance, within three standard errors."""
    on, off, shuffled = success(oracle, FACTS.test, tmp_path, program.told(FACTS.known | FACTS.held_out))
    error = 3 * (CHANCE * (1 - CHANCE) / len(FACTS.test)) ** 0.5
    assert on == 1.0
    assert abs(off - CHANCE) < error
    assert abs(shuffled - CHANCE) < error


def test_who_is_told_says_so_and_who_says_nothing_earns_nothing(tmp_path: Path) -> None:
    assert success(oracle, FACTS.statements[:8], tmp_path / "told") == [1.0]
    assert success(says(""), [*FACTS.test[:4], *FACTS.statements[:4]], tmp_path / "null") == [0.0]


def test_the_beginner_mostly_errs(tmp_path: Path) -> None:
    on, off, shuffled = success(beginner, FACTS.train, tmp_path, program.told(FACTS.known))
    assert 0.25 < on < 0.55
    assert max(off, shuffled) < 0.3


def test_customers_are_drawn_anew_and_those_held_out_are_never_asked_about_in_training() -> None:
    assert len(FACTS.known | FACTS.held_out | FACTS.before) == 160 + 128 + 600, "no customer is in two"
    assert shop(1).known != FACTS.known
    assert {task["answer"] for task in FACTS.train} <= set(DRINKS)
    assert {task["answer"] for task in FACTS.statements} == {NOTED}


def test_debug_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["--tiny", "--debug", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert shown.count("== task") == shown.count("execute_tool recall") == shown.count("reward 1.0\n") == 3
