"""Which calls count as never received; `tests/integration/test_lossy_network.py` loses answers of real SDKs."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from scripted import ScriptedEngine, ScriptedRollouts, in_loop, quick_tokenizer, serving

import agl
from agl import semconv
from agl.mdp.lost_answers import LOST, lost_answers
from agl.mdp.spans import Span
from agl.mdp.types import Call, float_array, int_array


def call(index: int, *, span: str | None = None, choice: int = 0, retry: int = 0, **fields: Any) -> Call:
    request = {"asked": {}, **({"retry": retry} if retry else {})}
    id = f"r{index}:{choice}" if choice else f"r{index}"
    facts: dict[str, Any] = {"prompt_ids": int_array([1, 2]), "span_id": span, "request": request, **fields}
    sampled = {"response_ids": int_array([index]), "logprobs": float_array([-1.0])}
    return Call(id, "ro-1", 1, index, "agent", "policy", 0, **facts, **sampled)


def span(id: str, *received: str) -> Span:
    attributes = {semconv.OPERATION_NAME: semconv.CHAT, semconv.RECEIVED: received}
    return Span("t", id, None, "ro-1", 1, "chat m", 0.0, 1.0, attributes=attributes)


def lost(calls: list[Call], *spans: Span) -> list[str]:
    found = lost_answers(calls, spans)
    assert {(c.finish_reason, c.error) for c in found} <= {("cancelled", LOST)}
    return [c.id for c in found]


def test_a_span_names_what_arrived() -> None:
    calls = [call(0, span="a"), call(1, span="a"), call(1, span="a", choice=1), call(2, span="b"), call(3, span="c")]
    assert lost(calls, span("a", "r1"), span("b")) == ["r0", "r2"]
    assert lost(calls) == []


def test_without_a_span_a_retry_shows_that_the_answer_before_was_lost() -> None:
    assert lost([call(0), call(1, retry=1), call(2, retry=2)]) == ["r0", "r1"]
    assert lost([call(0), call(1)]) == []
    # Of equal requests the last before it, all choices of one response.
    assert lost([call(0), call(1), call(1, choice=1), call(2, retry=1), call(3)]) == ["r1", "r1:1"]


def test_a_retry_says_nothing_of_other_requests() -> None:
    other = call(0, prompt_ids=int_array([1, 3]))
    assert lost([other, call(1, retry=1)]) == []
    assert lost([call(0, request={"asked": {"n": 2}}), call(1, retry=1)]) == []
    # An answer that another call continues has arrived.
    assert lost([call(0), call(1, parent_id="r0", prompt_ids=int_array([1, 2, 0, 5])), call(2, retry=1)]) == []
    # What failed is what the client tried again.
    failed = call(1, error="cancelled by the client", finish_reason="cancelled")
    assert lost([call(0), failed, call(2, retry=1)]) == []


@in_loop
async def test_a_request_that_is_sent_again_is_not_sampled_to_its_end() -> None:
    """The client waits no longer for the first one; an equal request of another client goes on."""
    engine = ScriptedEngine(quick_tokenizer(), ["one"], paused=True)
    async with serving(engine) as rig:
        attempt = await rig.attempt()
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        headers = {"Authorization": f"Bearer {attempt.key}"}

        async def post(agent: str, retry: int) -> int:
            own = headers | {"x-stainless-retry-count": str(retry)}
            url = f"{attempt.url(agent)}/chat/completions"
            return (await rig.http.post(url, json=body, headers=own)).status_code

        first = asyncio.ensure_future(post("agent", 0))
        other = asyncio.ensure_future(post("other", 0))
        while engine.running < 2:
            await asyncio.sleep(0.01)
        again = asyncio.ensure_future(post("agent", 1))
        assert await first == 499
        engine.resume.set()
        assert [await again, await other] == [200, 200]
        calls = await attempt.close()
    assert [(c.agent, c.finish_reason, c.request.get("retry")) for c in calls] == [
        ("agent", "cancelled", None), ("other", "stop", None), ("agent", "stop", 1)
    ]  # fmt: skip


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_a_run_marks_in_its_store_what_its_agent_did_not_read(closes: bool, tmp_path: Path) -> None:
    """An agent that leaves a stream after its first words was sent the whole answer, and got a part of it."""

    def reads_a_part(task: Any) -> str:
        client = OpenAI(base_url="http://provider.invalid/v1", api_key="sk-own")
        history: Any = [{"role": "user", "content": str(task)}]
        stream = client.chat.completions.create(model="m", messages=history, stream=True)
        next(iter(stream))
        # The gateway has sampled and recorded the whole answer.
        while algorithm.engine.running:
            time.sleep(0.01)
        if closes:
            stream.close()
        del stream
        gc.collect()
        whole = client.chat.completions.create(model="m", messages=history)
        return whole.choices[0].message.content or ""

    algorithm = ScriptedRollouts([" ".join(map(str, range(200))), "whole"])
    agent = agl.wrap(reads_a_part, reward=lambda task, output: float(output == "whole"))
    agl.Trainer(algorithm, directory=tmp_path, progress=False).fit(agent, ["a task"])  # type: ignore[arg-type]
    (calls,) = algorithm.calls
    assert [c.finish_reason for c in calls] == ["cancelled", "stop"]
    assert calls[0].error == LOST
    (trajectory,) = algorithm.trajectories
    assert [t.call.id for t in trajectory.transitions] == [calls[1].id]
    assert np.isfinite(trajectory.total_reward)
