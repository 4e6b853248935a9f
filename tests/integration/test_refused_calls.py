"""Tool calls that a framework refuses before a tool runs: their spans say what the model had asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl import semconv, tracing
from agl.agents.agent import Tracer
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.testing.provider import Reply, serve
from agl.tracing.context import RolloutContext


def refused_by(tracer: Tracer, program: Any, *replies: Reply) -> list[Span]:
    """The tools' spans of `program(url)`, whose model answers with these replies, one after the other."""
    left = iter(replies)
    rollout = RolloutContext("ro", 1, "solver", select(None))
    with serve(lambda body: next(left)) as provider, tracer, tracing.running(rollout):  # type: ignore[attr-defined]
        program(provider.url)
    return [s for s in rollout.spans if s.operation == semconv.EXECUTE_TOOL]


def facts(span: Span) -> tuple[str, str, Any, str]:
    attributes = span.attributes
    arguments = json.loads(attributes[semconv.TOOL_CALL_ARGUMENTS])
    return attributes[semconv.TOOL_NAME], span.status, arguments, attributes[semconv.TOOL_CALL_RESULT]


def test_an_output_that_pydantic_ais_validator_refuses() -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel
    from pydantic_ai import Agent, ModelRetry
    from subject_pydantic_ai import chat_model

    from agl.adapters.pydantic_ai import PydanticAITracer

    class Answer(BaseModel):
        value: int

    def program(url: str) -> None:
        agent = Agent(chat_model(url), name="solver", output_type=Answer)

        @agent.output_validator
        def is_small(answer: Answer) -> Answer:
            if answer.value > 9:
                raise ModelRetry("too large")
            return answer

        assert agent.run_sync("q").output == Answer(value=5)

    replies = [Reply(None, (("final_result", {"value": value}),)) for value in (50, 5)]
    [refused] = map(facts, refused_by(PydanticAITracer(), program, *replies))
    assert refused[:3] == ("final_result", "error", {"value": 50})
    assert "too large" in refused[3]


def test_a_tool_that_a_hook_of_strands_cancels() -> None:
    pytest.importorskip("strands")
    from strands.hooks import BeforeToolCallEvent
    from subject_strands import build

    from agl.adapters.strands import StrandsTracer

    def cancel(event: BeforeToolCallEvent) -> None:
        event.cancel_tool = "not today"

    def program(url: str) -> None:
        agent = build(url, "solver")
        agent.hooks.add_callback(BeforeToolCallEvent, cancel)
        agent("2+3")

    asked = Reply(None, (("add", {"a": 2, "b": 3}),))
    tools = refused_by(StrandsTracer(), program, asked, Reply("no"))
    assert [*map(facts, tools)] == [("add", "error", {"a": 2, "b": 3}, "not today")]


def test_a_tool_that_a_person_rejects_in_langchain() -> None:
    pytest.importorskip("langchain")
    from langchain.agents import create_agent
    from langchain.agents.middleware import HumanInTheLoopMiddleware
    from langchain_core.tools import tool
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command
    from subjects import chat_model

    from agl.adapters.langchain import LangChainTracer
    from agl.testing.subject import add

    def program(url: str) -> None:
        middleware = HumanInTheLoopMiddleware(interrupt_on={"add": True})
        agent: Any = create_agent(
            chat_model(url), [tool(add)], name="solver", middleware=[middleware], checkpointer=InMemorySaver()
        )
        thread: Any = {"configurable": {"thread_id": "1"}}
        agent.invoke({"messages": [("user", "2+3")]}, thread)
        agent.invoke(Command(resume={"decisions": [{"type": "reject", "message": "not today"}]}), thread)

    asked = Reply(None, (("add", {"a": 2, "b": 3}),))
    tools = refused_by(LangChainTracer(), program, asked, Reply("no"))
    [refused] = map(facts, tools)
    assert refused[:3] == ("add", "error", {"a": 2, "b": 3})
    assert "not today" in refused[3]


def test_a_tool_that_a_guardrail_of_the_agents_sdk_refuses() -> None:
    pytest.importorskip("agents")
    from agents import Agent, Runner, ToolGuardrailFunctionOutput, function_tool, tool_input_guardrail
    from subject_openai_agents import chat_model

    from agl.adapters.openai_agents import OpenAIAgentsTracer
    from agl.testing.subject import add

    @tool_input_guardrail
    def refuses(data: Any) -> ToolGuardrailFunctionOutput:
        small = json.loads(data.context.tool_arguments)["a"] < 9
        return ToolGuardrailFunctionOutput.allow() if small else ToolGuardrailFunctionOutput.reject_content("not today")

    def program(url: str) -> None:
        guarded = function_tool(add, tool_input_guardrails=[refuses])
        assert Runner.run_sync(Agent("solver", model=chat_model(url), tools=[guarded]), "q").final_output == "no"

    asked = Reply(None, (("add", {"a": 10, "b": 3}), ("add", {"a": 2, "b": 3})))
    tools = refused_by(OpenAIAgentsTracer(), program, asked, Reply("no"))
    assert sorted(map(facts, tools), key=str) == [
        ("add", "error", {"a": 10, "b": 3}, "not today"),
        ("add", "unset", {"a": 2, "b": 3}, "5"),
    ]
