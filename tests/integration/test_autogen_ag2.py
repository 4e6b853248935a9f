"""ag2 1.x: names, tools and structure of its agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ag2.middleware")

from ag2 import Agent
from ag2 import tool as as_tool
from ag2.config import OpenAIConfig

from agl import semconv, tracing
from agl.adapters.autogen import AutoGenTracer, wrap
from agl.agents.agent import Outcome, RolloutInfo
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.testing.provider import Provider, Reply, serve
from agl.testing.subject import KEY, add, uses_add
from agl.tracing.context import RolloutContext


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with AutoGenTracer(), tracing.running(context):
        yield context


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]


def solver(url: str, name: str = "solver", *, stream: bool = False, tools: Any = (add,)) -> Any:
    config = OpenAIConfig(model="m", base_url=url, api_key=KEY, streaming=stream, max_retries=0)
    return Agent(name, prompt="be brief", config=config, tools=[as_tool(t) for t in tools])


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_tools_lie_in_the_agents_span(provider: Provider, rollout: RolloutContext, stream: bool) -> None:
    reply = asyncio.run(solver(provider.url, stream=stream).ask("2+3"))
    assert reply.body.strip() == "sum 5"
    [agent] = of(rollout, semconv.INVOKE_AGENT)
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert [s.agent for s in of(rollout, semconv.CHAT)] == ["solver", "solver"]
    assert {s.parent_id for s in [*of(rollout, semconv.CHAT), tool]} == {agent.span_id}
    assert (tool.name, tool.agent) == ("execute_tool add", "solver")
    assert json.loads(tool.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"a": 2, "b": 3}
    assert tool.attributes[semconv.TOOL_CALL_RESULT] == "5"
    assert tool.attributes[semconv.TOOL_CALL_ID] == provider.last.body["messages"][-1]["tool_call_id"]


def test_a_failing_tool_is_recorded_with_its_exception(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: uses_add(a=-1)(body) if body["messages"][-1]["role"] != "tool" else Reply("sorry")
    asyncio.run(solver(provider.url).ask("2+3"))
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert (tool.status, tool.attributes[semconv.ERROR_TYPE]) == ("error", "ToolFailed")


def test_a_failed_call_is_raised_unchanged(provider: Provider, rollout: RolloutContext) -> None:
    import openai

    provider.script = lambda body: Reply(status=400)
    with pytest.raises(openai.BadRequestError, match="scripted 400"):
        asyncio.run(solver(provider.url).ask("2+3"))
    assert {s.status for s in of(rollout, semconv.CHAT)} == {"error"}


def test_twenty_rollouts_of_one_agent_in_tasks_never_mix(provider: Provider) -> None:
    rollouts = [RolloutContext(f"ro-{i:02}", 1, "outer", select(None), provider.root, "agl-key") for i in range(20)]
    agent = solver("http://provider.invalid/v1")

    async def run(rollout: RolloutContext) -> None:
        with tracing.running(rollout):
            await agent.ask(rollout.rollout_id)

    async def main() -> None:
        await asyncio.gather(*(run(r) for r in rollouts))

    with AutoGenTracer():
        asyncio.run(main())
    for rollout in rollouts:
        mine = [s for s in provider.seen if f"/rollouts/{rollout.rollout_id}/" in s.path]
        assert [rollout.rollout_id in json.dumps(s.body["messages"]) for s in mine] == [True, True]
        assert [s.traceparent_span for s in mine] == [s.span_id for s in of(rollout, semconv.CHAT)]
        assert len(rollout.spans) == 5


def test_uninstrument_restores_and_outside_a_rollout_nothing_changes(provider: Provider) -> None:
    before = vars(Agent)["_turn_scope"]
    with AutoGenTracer():
        assert vars(Agent)["_turn_scope"] is not before
        assert asyncio.run(solver(provider.url).ask("2+3")).body == "sum 5"
    assert vars(Agent)["_turn_scope"] is before
    assert not [s for s in provider.seen if "traceparent" in s.headers]


def test_an_agent_is_wrapped(provider: Provider) -> None:
    agent = wrap(solver(provider.url), lambda task, output: len(output))
    assert (agent.name, AutoGenTracer.handles(solver(provider.url))) == ("solver", True)
    done: Any = agent.run({"question": "2+3"}, {}, RolloutInfo("ro", 1))
    assert asyncio.run(done) == Outcome(5, "sum 5")
