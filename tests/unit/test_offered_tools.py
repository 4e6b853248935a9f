"""A tool's span has the description that the model's request gave of the tool, whatever the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from agl import semconv, tracing
from agl.adapters.openai import OpenAITracer
from agl.adapters.scopes import tool_run
from agl.mdp.selection import select
from agl.testing.provider import Provider, Reply, last_said, serve
from agl.tracing import offered_tools
from agl.tracing.context import RolloutContext
from agl.tracing.inferred import completed

SCHEMA = {"type": "object", "properties": {}}
FORMS: dict[str, list[Any]] = {
    "chat": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}],
    "responses": [{"type": "web_search"}, {"type": "function", "name": "add", "description": "Adds."}],
    "namespace": [{"type": "namespace", "name": "sums", "tools": [{"name": "add", "description": "Adds."}]}],
    "anthropic": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    "google": [{"googleSearch": {}}, {"functionDeclarations": [{"name": "add", "description": "Adds."}]}],
    "google, snake case": [{"function_declarations": [{"name": "add", "description": "Adds."}]}],
}


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "solver", select(None), prompts=True)
    with OpenAITracer(), tracing.running(context):
        yield context


def described(name: str, agent: str | None = None) -> Any:
    scope = tool_run(name, {}, None, agent=agent)
    assert scope is not None
    text = scope.span.attributes.get(semconv.TOOL_DESCRIPTION)
    tracing.end(scope)
    return text


@pytest.mark.parametrize("form", FORMS)
def test_each_api_s_form(form: str, rollout: RolloutContext) -> None:
    offered_tools.remember(rollout, "solver", FORMS[form])
    assert (described("add"), described("other")) == ("Adds.", None)


@pytest.mark.parametrize("tools", [None, "add", [None, 3], [{"name": "add"}], [{"function": "add"}], {"name": 1}])
def test_what_is_no_description_is_none(tools: Any, rollout: RolloutContext) -> None:
    offered_tools.remember(rollout, "solver", tools)
    assert described("add") is None


def test_an_agent_s_own_tools_come_first(rollout: RolloutContext) -> None:
    offered_tools.remember(rollout, "one", [{"name": "add", "description": "One adds."}])
    offered_tools.remember(rollout, "two", [{"name": "add", "description": "Two adds."}])
    assert [described("add", agent) for agent in ("one", "two", "three")] == ["One adds.", "Two adds.", "Two adds."]


def test_the_tools_of_many_agents_do_not_grow_for_ever(rollout: RolloutContext) -> None:
    for n in range(3 * offered_tools.MOST_AGENTS):
        offered_tools.remember(rollout, f"agent {n}", [{"name": "add"}])
    assert len(rollout.offered) == offered_tools.MOST_AGENTS


def asks(body: dict[str, Any]) -> Reply:
    return Reply("5") if last_said(body)[0] == "tool" else Reply(None, (("add", {"a": 2}),))


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(asks) as server:
        yield server


@pytest.mark.parametrize("content", [True, False])
def test_a_loop_by_hand(content: bool, provider: Provider, rollout: RolloutContext) -> None:
    rollout.capture_content = content
    with openai.OpenAI(base_url=provider.url, api_key="k") as client:
        messages: list[Any] = [{"role": "user", "content": "2 + 3"}]
        options: dict[str, Any] = {"model": "m", "tools": FORMS["chat"]}
        answer = client.chat.completions.create(messages=messages, **options).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "5"})
        client.chat.completions.create(messages=messages, **options)
    tools = [s for s in completed(rollout.spans) if semconv.INFERRED in s.attributes]
    assert [s.attributes.get(semconv.TOOL_DESCRIPTION) for s in tools] == (["Adds."] if content else [])
    assert content or "Adds." not in json.dumps([dict(s.attributes) for s in rollout.spans], default=str)
    assert content or rollout.offered == {}
