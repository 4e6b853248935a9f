"""examples/smollm2/repair.py: its tasks, and mini-swe-agent, the real program, on the expert, on nothing and on a tiny
policy."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
from coding_agents import BY_NAME, PROGRAMS

import agl
from agl.testing.provider import Script, says, serve
from examples.common import Endpoint
from examples.smollm2 import repair
from examples.smollm2.__main__ import main

pytestmark = pytest.mark.slow
CLAIM = repair.claim(Namespace(seed=0))


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> None:
    if BY_NAME["mini"].path is None:
        pytest.skip("mini is not installed: tests/harnesses/install.sh DIR mini, then AGL_HARNESSES=DIR")
    monkeypatch.setenv("PATH", str(PROGRAMS), prepend=":")


def test_each_task_is_solved_by_its_fix_and_by_nothing_less(tmp_path: Path) -> None:
    assert {task["kind"] for task in CLAIM.heldout} == set(repair.KINDS)
    assert len(repair.KINDS) == 12
    for number, task in enumerate(CLAIM.heldout):
        folder = tmp_path / str(number)
        folder.mkdir()
        for path, text in repair.files(task).items():
            (folder / path).write_text(text)
        assert "hidden" not in " ".join(repair.files(task))
        assert repair.grade(task, folder) == 0
        assert subprocess.run(["python3", "test.py"], cwd=folder, capture_output=True).returncode == 1
        done = subprocess.run(repair.fixed(task), shell=True, cwd=folder, capture_output=True, text=True)
        assert done.stdout == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n", (task, done)
        assert repair.grade(task, folder) == 1
        (folder / "solution.py").unlink()
        assert repair.grade(task, folder) == 0


def test_no_held_out_program_is_imitated() -> None:
    assert not {t["broken"] for t in CLAIM.heldout} & {t["broken"] for t in CLAIM.recorded}


@pytest.mark.usefixtures("mini")
def test_the_expert_solves_held_out_tasks_and_who_does_nothing_none(tmp_path: Path) -> None:
    some = list(CLAIM.heldout[:12])

    def success(script: Script, name: str, tasks: list[repair.Task]) -> list[float | None]:
        with serve(script) as provider:
            agent = repair.build(Endpoint(provider.url, "scripted", "none"))
            report = agl.evaluate(
                agent, tasks, {"scripted": None}, directory=tmp_path / name, n_workers=2, progress=False
            )
        (policy,) = report.policies.values()
        assert policy.failed == 0
        return [rollout.reward for rollout in policy.rollouts]

    assert success(repair.expert(some), "expert", some) == [1.0] * 12
    nothing = says("```sh\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```")
    assert success(nothing, "nothing", some[:2]) == [0.0] * 2


@pytest.mark.usefixtures("mini")
def test_its_recipe_runs_to_the_end(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = main(["repair", "--short", "--model", str(tiny_policy), "--threads", "1"])
    assert facts == json.loads((tmp_path / "runs/smollm2-repair-0/result.json").read_text())
    assert (facts["claim"], facts["heldout"], facts["rollouts"]) == ("repair", 2, 2)
    assert len(facts["measured"]) == 3
