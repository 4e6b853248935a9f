"""A function's frameworks are traced without a word about them, imported before the run or by the function itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from learning_agents import KEY, URL
from running import fit

import agl
from agl import semconv
from agl.adapters.openai_agents import OpenAIAgentsTracer
from agl.adapters.strands import StrandsTracer

pytest.importorskip("strands")
pytest.importorskip("agents")


async def writes_and_checks(task: Any) -> str:
    from agents import Agent as SDKAgent
    from agents import OpenAIProvider, Runner
    from strands import Agent
    from strands.models.openai import OpenAIModel

    writer = Agent(
        model=OpenAIModel(client_args={"base_url": URL, "api_key": KEY}, model_id="m"),
        name="writer",
        callback_handler=None,
    )
    text = str(await writer.invoke_async(task["question"]))
    model = OpenAIProvider(base_url=URL, api_key=KEY, use_responses=False).get_model("m")
    return (await Runner.run(SDKAgent(name="checker", model=model), text)).final_output


async def rewarded(task: Any) -> float:
    return float(len(await writes_and_checks(task)))


def long(task: Any, output: str) -> float:
    return float(len(output))


@pytest.mark.parametrize(
    "agent", [agl.rollout(rewarded), agl.wrap(writes_and_checks, reward=long)], ids=["rollout", "wrap"]
)
def test_the_agents_of_both_frameworks_have_their_names(agent: Any, tmp_path: Path) -> None:
    algorithm = fit(agent, [{"question": "hi"}], tmp_path, agents=["writer", "checker"])
    [calls] = algorithm.calls
    assert [c.agent for c in calls] == ["writer", "checker"]
    assert {s.agent for s in algorithm.spans[0] if s.operation == semconv.INVOKE_AGENT} >= {"writer", "checker"}
    assert not StrandsTracer().instrumented
    assert not OpenAIAgentsTracer().instrumented


def test_a_tracer_that_was_chosen_is_the_only_one(tmp_path: Path) -> None:
    algorithm = fit(agl.rollout(rewarded), [{"question": "hi"}], tmp_path, tracer=StrandsTracer())
    [calls] = algorithm.calls
    assert [c.agent for c in calls] == ["writer", "rewarded"]
