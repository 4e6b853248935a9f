"""verl's runs with many runners: gateway processes by themselves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from jobs import algorithm
from processes import gateway_processes
from running import say

import agl
from agl.trainer.quickstart.tasks import arithmetic_tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_one_gateway_process_for_every_few_hundred_runners(
    cluster: None, left_clean: None, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agl.trainer.verl import bridge

    monkeypatch.setattr(bridge, "RUNNERS_PER_GATEWAY", 3)
    ports: Counter[int | None] = Counter()
    alive: set[int] = set()

    @agl.rollout
    def agent(task: dict[str, str], llm: agl.LLM) -> float:
        ports[urlsplit(llm.endpoint).port] += 1
        alive.add(len(gateway_processes()))
        return float(say(llm, task["question"]) == task["answer"])

    trainer = agl.Trainer(algorithm(tiny_policy, steps=1), directory=tmp_path / "run", n_workers=4, progress=False)
    result = trainer.dev(agent, arithmetic_tasks(8, seed=0, split="train"), n_tasks=8)
    assert (result.history[0]["train/rollouts"], result.history[0]["train/failed_rollouts"]) == (8, 0)
    assert (alive, sorted(ports.values())) == ({2}, [4, 4])
    assert gateway_processes() == []
