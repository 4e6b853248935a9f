"""Prompts, then weights: a training, an evaluation and a resumed run with the prompts of a directory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import agl
from agl import semconv
from agl.errors import CheckpointError
from agl.mdp.spans import Span
from agl.testing.provider import says, serve
from agl.trainer.store import open_store


@agl.rollout
def writer(task: Any, llm: agl.LLM, plan: agl.PromptTemplate) -> float:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages: Any = [{"role": "system", "content": "Write."}, {"role": "user", "content": plan.format(q=task)}]
    answer = client.chat.completions.create(model=llm.model, messages=messages)
    return float(len(answer.choices[0].message.content or "") % 5)


def prompts(directory: Path, text: str = "Write well.") -> Path:
    resources = {"plan": agl.PromptTemplate("Better: {q}"), "style": agl.SystemPrompt("writer", text, "Write.")}
    agl.save_prompts(directory, resources)
    return directory


def requests(url: str) -> set[str]:
    """The messages of every call, as JSON."""

    async def query() -> set[str]:
        store = await open_store(url)
        found = set()
        for rollout in await store.query_rollouts():
            found |= {json.dumps(c.request["messages"]) for c in await store.query_calls(rollout.rollout_id)}
        await store.close()
        return found

    return asyncio.run(query())


@pytest.mark.slow
def test_grpo_trains_with_the_prompts_of_a_directory(untrained_model: Path, tmp_path: Path) -> None:
    def fit(steps: int, *, resume: bool = False, text: str = "Write well.") -> agl.Result:
        algorithm = agl.GRPO(
            model=str(untrained_model), group_size=2, batch_size=1, epochs=steps, learning_rate=1e-3,
            max_response_tokens=4, max_context=128, val_every=9, prompts=prompts(tmp_path / "prompts", text),
        )  # fmt: skip
        own = {"plan": agl.PromptTemplate("Own: {q}")}
        trainer = agl.Trainer(algorithm, directory=tmp_path / "run", progress=False, initial_resources=own)
        return trainer.fit(writer, ["q"], ["v"], resume=resume)

    result = fit(1)
    system = {"role": "system", "content": "Write well."}
    assert requests(result.store) == {
        json.dumps([system, {"role": "user", "content": f"Better: {task}"}]) for task in ("q", "v")
    }
    with pytest.raises(CheckpointError, match="prompts:"):
        fit(1, resume=True, text="Write otherwise.")


def test_an_evaluation_on_the_agents_own_model_gets_them(tmp_path: Path) -> None:
    @agl.rollout
    def own(task: Any) -> float:
        client = OpenAI(base_url=provider.url, api_key="sk-own")
        messages: Any = [{"role": "system", "content": "Write."}, {"role": "user", "content": task}]
        return float(client.chat.completions.create(model="own", messages=messages).choices[0].message.content == "ok")

    agl.save_prompts(tmp_path / "prompts", {"p": agl.SystemPrompt("own", "Write well.", "Write.")})
    with serve(says("ok")) as provider:
        report = agl.evaluate(
            own, ["a", "b"], directory=tmp_path / "eval", progress=False, prompts=tmp_path / "prompts"
        )
    assert [p.success.value for p in report.policies.values()] == [1.0]
    assert [s.body["messages"][0]["content"] for s in provider.seen] == ["Write well."] * 2
    assert {s.headers["authorization"] for s in provider.seen} == {"Bearer sk-own"}
    spans = asyncio.run(chats(tmp_path / "eval" / "run.db"))
    assert [[*s.attributes[semconv.SYSTEM_PROMPTS]] for s in spans] == [["p"], ["p"]]
    assert all("Write well." in str(s.attributes[semconv.INPUT_MESSAGES]) for s in spans)


async def chats(path: Path) -> list[Span]:
    store = await open_store(f"sqlite:///{path}")
    spans = [s for r in await store.query_rollouts() for s in await store.query_spans(r.rollout_id)]
    await store.close()
    return [s for s in spans if s.operation == semconv.CHAT]
