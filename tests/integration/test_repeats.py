"""A failure of the agent's or the reward's own code that would only happen again is not tried again; any other is."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from running import attempts, fit, say

import agl
from agl.errors import AglError
from agl.trainer.report.explain import explain, render
from agl.trainer.store.types import NOT_AGAIN


def tries(agent: Any, tasks: list[Any], directory: Path, **options: Any) -> list[int]:
    """How many attempts each task's rollout had."""
    with contextlib.suppress(AglError):  # a run of which every rollout failed
        fit(agent, tasks, directory, **{"n_workers": 1, "max_attempts": 4} | options)
    return [len(each) for each in attempts(directory)]


@pytest.mark.parametrize("runners", ["local", "process"])
def test_the_second_failure_of_the_same_kind_is_the_last(runners: Any, tmp_path: Path) -> None:
    @agl.rollout
    def clerk(task: Any, llm: agl.LLM) -> float:
        return task["answer"]

    assert tries(clerk, [{"question": "?"}], tmp_path, runners=runners) == [2]
    [[first, second]] = attempts(tmp_path)
    assert NOT_AGAIN not in (first.error or "")
    store = f"sqlite:///{tmp_path / 'run.db'}"
    shown = render(explain(first.rollout_id, store))
    assert "raised KeyError: 'answer'" in shown
    assert shown.count("not tried again: the attempt before it failed in the same way") == 1
    assert second.error is not None
    assert second.error.splitlines()[-1].startswith(NOT_AGAIN)


def test_a_reward_that_raises_or_is_missing_is_such_a_failure(tmp_path: Path) -> None:
    def score(task: Any, output: str) -> float:
        return json.loads(output)

    def answer(task: Any) -> str:
        return "no JSON"

    assert tries(agl.wrap(answer, reward=score), [1], tmp_path / "raises", agents="none*") == [2]

    @agl.rollout
    def unrewarded(task: Any, llm: agl.LLM) -> None:
        say(llm, "hello")

    assert tries(unrewarded, [1], tmp_path / "missing") == [2]


def refused() -> None:
    raise ConnectionError("the tool server refused")


def wrapped() -> None:
    try:
        refused()
    except ConnectionError:
        raise RuntimeError("the tool failed")  # noqa: B904 -- as careless as agents are


class ReadTimeout(Exception):
    __module__ = "httpx"


def late() -> None:
    raise ExceptionGroup("tools", [ReadTimeout("")])


@pytest.mark.parametrize("tool", [refused, wrapped, late])
def test_what_the_network_causes_is_tried_to_the_last(tool: Any, tmp_path: Path) -> None:
    @agl.rollout
    def agent(task: Any, llm: agl.LLM) -> float:
        tool()
        return 1.0

    assert tries(agent, [1], tmp_path) == [4]


def test_another_message_or_another_place_is_another_failure(tmp_path: Path) -> None:
    seen = Counter[str]()

    @agl.rollout
    def agent(task: Any, llm: agl.LLM) -> float:
        seen[task] += 1
        if task == "message":
            raise ValueError(f"cannot read answer {seen[task]}")
        if seen[task] % 2:
            raise ValueError("cannot read")
        raise ValueError("cannot read")

    assert tries(agent, ["message"], tmp_path / "message") == [4]
    assert tries(agent, ["place"], tmp_path / "place") == [4]


def test_what_has_failed_twice_for_others_is_not_tried_again_at_all(tmp_path: Path) -> None:
    @agl.rollout
    def agent(task: Any, llm: agl.LLM) -> float:
        say(llm, "hello")
        return task["reward"]

    tasks = [{"reward": 1.0}, *({} for _ in range(4)), {"reward": 1.0}]
    assert tries(agent, tasks, tmp_path, max_attempts=2) == [1, 2, 2, 1, 1, 1]
    *_, last, _ = attempts(tmp_path)
    assert "2 rollouts of this step failed in the same way" in (last[0].error or "")


def test_what_succeeds_at_another_attempt_is_a_matter_of_chance(tmp_path: Path) -> None:
    seen = Counter[int]()

    @agl.rollout
    def agent(task: int, llm: agl.LLM) -> float:
        say(llm, "hello")
        seen[task] += 1
        if task > 0 and (task != 1 or seen[task] == 1):
            raise ValueError("no answer")
        return 1.0

    assert tries(agent, [0, 1, 2, 3, 4, 5], tmp_path, max_attempts=2) == [1, 2, 2, 2, 2, 2]
