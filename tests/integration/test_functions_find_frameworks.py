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
pytest.importorskip("autogen_core")

# A handler's types are read from its annotations, which are names of this module.
from autogen_core import AgentId, MessageContext, RoutedAgent, SingleThreadedAgentRuntime, message_handler
from autogen_core.models import UserMessage


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


async def functional(task: Any) -> float:
    """LangGraph's functional API, and no graph."""
    from langchain_openai import ChatOpenAI
    from langgraph.func import entrypoint
    from langgraph.func import task as step
    from pydantic import SecretStr

    model = ChatOpenAI(model="m", base_url=URL, api_key=SecretStr(KEY))

    @step
    async def writer(question: str) -> str:
        return (await model.ainvoke(question)).text

    @step
    async def checker(text: str) -> str:
        return (await model.ainvoke(text)).text

    @entrypoint()
    async def flow(question: str) -> str:
        return await checker(await writer(question))

    return float(len(await flow.ainvoke(task["question"])))


async def core_agents(task: Any) -> float:
    """autogen-core, and nothing of agentchat."""
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {"vision": False, "function_calling": False, "json_output": False, "family": "unknown",
                 "structured_output": False}  # fmt: skip
    client = OpenAIChatCompletionClient(model="m", base_url=URL, api_key=KEY, model_info=info)

    class Speaker(RoutedAgent):
        @message_handler
        async def on_text(self, message: UserMessage, ctx: MessageContext) -> UserMessage:
            answer = await client.create([message], cancellation_token=ctx.cancellation_token)
            return UserMessage(content=str(answer.content), source=self.id.type)

    runtime = SingleThreadedAgentRuntime()
    for name in ("writer", "checker"):
        await Speaker.register(runtime, name, lambda: Speaker("speaks"))
    runtime.start()
    message = UserMessage(content=task["question"], source="user")
    for name in ("writer", "checker"):
        message = await runtime.send_message(message, AgentId(name, "default"))
    await runtime.stop()
    return float(len(str(message.content)))


@pytest.mark.parametrize("program", [functional, core_agents])
def test_parts_of_a_framework_that_are_used_alone_have_names(program: Any, tmp_path: Path) -> None:
    algorithm = fit(agl.rollout(program), [{"question": "hi"}], tmp_path, agents=["writer", "checker"])
    [calls] = algorithm.calls
    assert [c.agent for c in calls] == ["writer", "checker"]
