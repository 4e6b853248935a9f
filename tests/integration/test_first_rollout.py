"""What is wrong with an agent, its reward or `agents=` is found by a few rollouts, not by a step of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from running import say
from tiny_run import TRAIN

import agl
from agl.errors import AglError
from agl.trainer.report.explain import list_rollouts


class Asked:
    """Counts the runs of an agent, and how many were at the same time."""

    def __init__(self) -> None:
        self.runs = self.now = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.runs, self.now = self.runs + 1, self.now + 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


def fit(model: Path, directory: Path, agent: Any, tasks: Any = TRAIN, **settings: Any) -> agl.Result:
    algorithm = agl.GRPO(
        model=str(model), group_size=8, batch_size=4, steps=1, learning_rate=1e-3, max_response_tokens=6,
        max_context=128, threads=1,
    )  # fmt: skip
    return agl.Trainer(algorithm, n_workers=8, directory=directory, progress=False, **settings).fit(agent, tasks)


@pytest.mark.parametrize(("settings", "message"), [({}, "no such column"), ({"agents": "anothr"}, "'anothr'")])
def test_what_fails_alike_again_and_again_ends_the_run(
    settings: dict[str, Any], message: str, untrained_model: Path, tmp_path: Path
) -> None:
    asked = Asked()

    @agl.rollout
    def clerk(task: dict[str, str], llm: agl.LLM) -> float:
        with asked:
            if settings:
                say(llm, task["question"])
                return 1.0
            raise LookupError("no such column")

    with pytest.raises(AglError, match=message) as raised:
        fit(untrained_model, tmp_path, clerk, **settings)
    assert "all 3 rollouts of the first try failed" in str(raised.value)
    assert asked.runs in (5, 6), "three tasks, each twice unless two others have failed twice by then"
    assert len(list_rollouts(tmp_path)) == 3, "no other was asked for"


def test_a_task_that_cannot_be_done_is_no_reason_to_stop(untrained_model: Path, tmp_path: Path) -> None:
    asked, first = Asked(), []

    @agl.rollout
    def clerk(task: dict[str, str], llm: agl.LLM) -> float:
        with asked:
            first.append(task["question"])
            if task["question"] == first[0]:
                raise LookupError("not in this task")
            return float(len(say(llm, task["question"])) % 2)

    result = fit(untrained_model, tmp_path, clerk)
    assert result.history[-1]["train/failed_rollouts"] == 8
    assert asked.most > 1, "the others run together"
    assert first.count(first[0]) == 16


def test_the_first_runs_alone(untrained_model: Path, tmp_path: Path) -> None:
    together: list[int] = []
    asked = Asked()

    @agl.rollout
    def clerk(task: dict[str, str], llm: agl.LLM) -> float:
        with asked:
            together.append(asked.now)
            return float(len(say(llm, task["question"])) % 2)

    fit(untrained_model, tmp_path, clerk)
    assert together[:2] == [1, 1]
    assert len(together) == 32
