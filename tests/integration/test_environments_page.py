"""The blocks of docs/environments.md, run as they stand: only addresses and names of examples are replaced."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import documents
import pytest
from environments import SUPPORT, subjects

import agl
from agl.testing.provider import Reply, last_said, serve

PAGE = [b for b in documents.blocks() if b.page == "docs/environments.md" and b.language == "python"]
LOADED = [b for b in PAGE if b.what.endswith("::test_block")]
REPLACED = {
    "my_package:MyGame": "small_gymnasium:Broken",
    "verifiers:wordle": "verifiers:small_verifiers",
    "my_tasks.py": str(SUPPORT / "small_inspect.py"),
}
SUBJECTS = {s.id: s for s in subjects()}
NEEDS = {"nemo-gym": "nemo-gym:counter", "openenv": "openenv:text", "harbor": "harbor:sums"}


def found(test: str) -> str:
    (block,) = [b for b in PAGE if b.what.endswith(f"::{test}")]
    return block.text


def kind_of(block: documents.Block) -> str:
    return block.text.partition('"')[2].partition(":")[0] or block.text.split('"')[1].partition(":")[0]


@pytest.mark.parametrize("block", LOADED, ids=[f"{kind_of(b)}-{b.number}" for b in LOADED])
def test_block(block: documents.Block, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of(block)
    subject = SUBJECTS.get(NEEDS.get(kind, "")) or next(s for s in SUBJECTS.values() if s.id.startswith(kind))
    if kind == "inspect":
        subject = SUBJECTS["inspect:memory_poison"]
    if subject.missing:
        pytest.skip(subject.missing)
    monkeypatch.syspath_prepend(str(SUPPORT))
    names: dict[str, Any] = {"agl": agl}
    text = block.text
    for example, real in REPLACED.items():
        text = text.replace(example, real)
    with contextlib.ExitStack() as stack:
        if kind in NEEDS:
            name, options = stack.enter_context(subject.open())
            text = text.replace("http://localhost:8000", name.partition(":")[2])
            text = text.replace("harbor:my-tasks", name)
            text = text.replace("data/example.jsonl", str(options.get("tasks", "")))
        exec(text, names)
        made = [value for name, value in names.items() if name not in ("agl", "__builtins__")]
        assert made
        for environment in made:
            assert environment.tasks
            assert environment.reward(environment.tasks[0], "") <= 0


def test_training(untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    monkeypatch.chdir(tmp_path)
    small: dict[str, Any] = {
        "model": str(untrained_model), "steps": 1, "group_size": 2, "batch_size": 2, "max_response_tokens": 6,
    }  # fmt: skip
    grpo = agl.GRPO
    monkeypatch.setattr(agl, "GRPO", lambda **options: grpo(**{**options, **small}))
    names: dict[str, Any] = {}
    exec(found("test_training").replace("n=128", "n=2"), names)
    (step,) = [entry for entry in names["result"].history if "train/reward" in entry]
    assert step["train/failed_rollouts"] == 0
    assert [len(names[name].tasks) for name in ("train", "held_out")] == [512, 2]


def test_an_agent_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    pytest.importorskip("langchain_openai", reason="langchain is not installed")
    monkeypatch.chdir(tmp_path)
    train, held_out = (agl.environments.load("reasoning-gym:gcd", n=4, seed=seed) for seed in (0, 1))
    answers = {task["question"]: task["answer"] for task in held_out.tasks}
    report: list[Any] = []
    monkeypatch.setattr(agl, "evaluate", partial(_kept, agl.evaluate, report))
    with serve(lambda body: Reply(answers[last_said(body)[1]])) as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        exec(found("test_an_agent_of_your_own"), {"agl": agl, "train": train, "held_out": held_out})
    (policy,) = report[0].policies.values()
    assert [r.reward for r in policy.rollouts] == [1.0] * 4
    assert json.dumps(held_out.tasks)


def _kept(evaluate: Any, report: list[Any], *args: Any) -> None:
    report.append(evaluate(*args, progress=False))
