"""examples/massgen: the reward is reached by who knows, not by who says nothing, and the command runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import agl
from agl.testing.provider import Script, serve
from examples import common
from examples.massgen import scripts
from examples.massgen.__main__ import build, main
from examples.massgen.tasks import make_tasks, right_answer


def success(script: Script, place: Path, *, present: bool = False) -> float:
    tasks = make_tasks(16, seed=3, split="train")
    with serve(script) as server:
        agent = build(common.Endpoint(server.url, "m", "k"), present)
        report = agl.evaluate(agent, tasks, {"it": None}, directory=place, agents=["agent_a"], n_workers=4)
    return report.policies["it"].success.value


@pytest.mark.parametrize(("script", "value"), [(scripts.oracle, 1.0), (scripts.null, 0.0)], ids=["oracle", "null"])
def test_who_knows_agrees_and_who_says_nothing_does_not(script: Script, value: float, tmp_path: Path) -> None:
    assert success(script, tmp_path, present=value == 1.0) == value


def test_a_beginner_knows_the_form_and_mostly_errs(tmp_path: Path) -> None:
    assert 0 < success(scripts.beginner, tmp_path) < 0.6


def test_held_out_questions_are_never_trained() -> None:
    train, held_out = (make_tasks(300, seed=0, split=split) for split in ("train", "held_out"))
    asked = [{(task["question"].split()[-1], task["answer"]) for task in tasks} for tasks in (train, held_out)]
    assert asked[0].isdisjoint(asked[1])
    assert all(right_answer(task["question"]) == task["answer"] for task in train + held_out)
    assert train == make_tasks(300, seed=0, split="train")


def test_debug_shows_a_discussion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tiny", "--debug", "--out", str(tmp_path / "out")])
    told = capsys.readouterr().out
    assert told.count("reward 1.0") == 3
    assert "agent_a" in told
    assert "vote" in told
