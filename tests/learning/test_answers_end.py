"""Answers that are cut make Strands and the Agents SDK raise. They are trained all the same, until answers end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_agents import KEY, URL

import agl
from agl.mdp.types import Call
from agl.trainer.store import open_store
from agl.trainer.store.types import Rollout, TrainedCall

pytestmark = [pytest.mark.slow, pytest.mark.night]

LONGEST, STEPS = 64, 13


def strands() -> Any:
    pytest.importorskip("strands")
    import openai
    from strands import Agent
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client=openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0), model_id="m")
    return Agent(model=model, name="writer", callback_handler=None)


def openai_agents() -> Any:
    pytest.importorskip("agents")
    from agents import Agent, OpenAIProvider

    return Agent(name="writer", model=OpenAIProvider(base_url=URL, api_key=KEY).get_model("m"))


def brief(task: Any, output: str) -> float:
    return 1 / (1 + len(output))


@pytest.mark.parametrize("build", [strands, openai_agents])
def test_answers_get_shorter_until_they_end(build: Callable[[], Any], untrained_model: Path, tmp_path: Path) -> None:
    algorithm = agl.GRPO(
        model=str(untrained_model), group_size=16, batch_size=2, steps=STEPS, learning_rate=1e-2,
        max_response_tokens=LONGEST, max_context=256, threads=1,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, directory=tmp_path, n_workers=16, progress=False)
    result = trainer.fit(agl.wrap(build(), reward=brief), [{"question": f"question {i}"} for i in range(4)])

    first, last = result.history[0], result.history[-1]
    assert first["train/policy_faults"] == first["train/policy_faults/length"] >= 28
    assert last["train/policy_faults"] <= 12
    assert all(entry["train/failed_rollouts"] == 0 for entry in result.history)

    rollouts, calls, trained = asyncio.run(_stored(tmp_path))
    assert {(r.status, r.attempts) for r in rollouts} == {("succeeded", 1)}
    sizes = [np.mean([c.response_ids.size for c in calls[s]]) for s in range(STEPS)]
    assert sizes[0] > 0.9 * LONGEST
    assert sizes[-1] < 0.7 * LONGEST
    # Every sampled token of an answer that was cut was trained, against the others of its group.
    cut = [c for c in calls[1] if c.finish_reason == "length"]
    assert len(cut) >= 16
    assert {c.response_ids.size for c in cut} == {LONGEST}
    assert {trained[c.id].tokens for c in cut} == {LONGEST}
    assert all(trained[c.id].advantage <= 0 for c in cut)


async def _stored(directory: Path) -> tuple[list[Rollout], dict[int, list[Call]], dict[str, TrainedCall]]:
    """The rollouts, their calls by step, and what training did with each call."""
    store = await open_store(f"sqlite:///{directory / 'run.db'}")
    rollouts = await store.query_rollouts()
    calls: dict[int, list[Call]] = {}
    trained: dict[str, TrainedCall] = {}
    for r in rollouts:
        calls.setdefault(r.step or 0, []).extend(await store.query_calls(r.rollout_id))
        trained |= {t.call_id: t for t in await store.query_trained_calls(r.rollout_id)}
    await store.close()
    return rollouts, calls, trained
