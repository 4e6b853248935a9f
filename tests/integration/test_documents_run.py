"""The Python of the documents runs as it stands: each page's blocks in their order, in one namespace.

What a page takes for granted (an agent, its reward, tasks, a provider) is made here. Algorithms keep every option that
the page names, but train the tiny policy for one step of two short answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import documents
import pytest
from tiny_run import train

import agl
from agl.testing.provider import Provider, Reply, serve

SMALL = {"group_size": 2, "batch_size": 2, "max_response_tokens": 6, "max_context": 256, "val_every": 1}
TRAINED = ("GRPO", "SFT")
PAGES = sorted({b.page for b in documents.blocks() if b.language == "python" and not b.kind})
TASKS = [{"question": f"what is {i}+1?", "answer": str(i + 1)} for i in range(4)]


def in_small(algorithm: Any, there: Path, **options: Any) -> Any:
    """The algorithm with the page's options, checked as ever, but small, and with the model that there is."""
    sizes = {name: value for name, value in SMALL.items() if name in algorithm.__dataclass_fields__}
    length = {"steps": 1, "epochs": None} if algorithm is not agl.SFT else {"epochs": 1, "steps": None}
    known = options.get("model", "")
    at = known if known and Path(known).is_dir() else str(there)
    if "lora" in options:
        options["lora"] = agl.LoraSpec(rank=2)
    return algorithm(**{**options, **sizes, **length, "model": at})


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """The provider of the reader's own agent, found by the environment. It is right, so its traces can be imitated."""

    def answer(body: dict[str, Any]) -> Reply:
        number = re.search(r"(\d+)\+1", json.dumps(body))
        return Reply(str(int(number[1]) + 1) if number else "4")

    with serve(answer) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        yield server


def search(query: str) -> str:
    """Search for a text."""
    return "4"


def my_agent(task: dict[str, str]) -> str:
    from openai import OpenAI

    messages: Any = [{"role": "user", "content": task["question"]}]
    # Weights made at random hardly ever end an answer by themselves.
    answer = OpenAI().chat.completions.create(model="m", messages=messages, max_tokens=6)
    return answer.choices[0].message.content or ""


def score(task: dict[str, str], output: Any) -> float:
    """1 for what is right, otherwise something that differs between answers."""
    return 1.0 if output == task["answer"] else len(str(output)) % 5 / 5


@pytest.fixture
def stage(untrained_model: Path, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the pages take for granted."""
    monkeypatch.chdir(tmp_path)
    made = {name: partial(in_small, getattr(agl, name), untrained_model) for name in TRAINED}
    for name, algorithm in made.items():
        monkeypatch.setattr(agl, name, algorithm)
    for name in ("small", "Qwen/Qwen2.5-1.5B-Instruct"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(untrained_model)
    agent = agl.wrap(my_agent, reward=score)
    algorithm = agl.GRPO()
    return {
        "agl": agl, "json": json, "re": re, "my_agent": my_agent, "score": score, "search": search, "agent": agent,
        "tasks": TASKS, "train": TASKS, "train_tasks": TASKS, "val": TASKS[:2], "held_out": TASKS[:2], "key": "sk-own",
        "algorithm": algorithm, "trainer": agl.Trainer(algorithm, directory="runs/mine", progress=False),
    }  # fmt: skip


def recorded(*directories: str) -> None:
    """Runs of the reader's own agent."""
    agent = agl.wrap(my_agent, reward=score)
    for directory in directories:
        agl.Trainer(agl.Baseline(), directory=directory, progress=False).fit(agent, TASKS)


def trained(stage: dict[str, Any]) -> None:
    stage["trainer"].fit(stage["agent"], TASKS)
    Path("agl-run").symlink_to("runs/mine")


BEFORE: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/traces.md": lambda stage: recorded("runs/a"),
    "docs/training.md": lambda stage: recorded("runs/a", "runs/b"),
    "docs/store.md": trained,
}
"""Page -> what its reader did before."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, stage: dict[str, Any]) -> None:
    BEFORE.get(page, lambda stage: None)(stage)
    for block in documents.blocks():
        if block.page == page and block.language == "python" and not block.kind:
            exec(compile(block.text, str(block), "exec"), stage)


@pytest.mark.slow
def test_the_numbers_of_the_decision_tree_are_those_of_a_run(untrained_model: Path, tmp_path: Path) -> None:
    page = (documents.ROOT / "docs" / "reward-does-not-rise.md").read_text()
    named = set(re.findall(r"`((?:train|val|learner)/[a-z_]+)`", page))
    assert len(named) > 12
    result = train(untrained_model, tmp_path, steps=1, val=TASKS)
    assert named <= set(result.history[-1])
