"""`agl.environments.as_verifiers`: an agl agent that verifiers evaluates, by its own client, on a scripted server."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

import agl
from agl.errors import DatasetError
from agl.testing.provider import Reply, Script, last_said, says, serve

vf = pytest.importorskip("verifiers", reason="verifiers is not installed")
pytest.importorskip("verifiers.legacy", reason="verifiers 0.4 has no vf.MultiTurnEnv any more")

TASKS = [{"question": f"{a} + {a}", "answer": 2 * a} for a in (3, 4, 5)]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def evaluate(environment: Any, script: Script, **options: Any) -> tuple[list[Any], list[Any]]:
    """verifiers' own evaluation, by its own client: the outputs, and the requests that the server saw."""
    with serve(script) as provider:
        client = vf.OpenAIChatCompletionsClient(AsyncOpenAI(base_url=provider.url, api_key="k", max_retries=0))
        results = asyncio.run(
            environment.evaluate(client, "trained-model", state_columns=["trajectory"], on_progress=[], **options)
        )
        return sorted(results["outputs"], key=lambda o: o["example_id"]), list(provider.seen)


def calculator(body: dict[str, Any]) -> Reply:
    role, text = last_said(body)
    if role == "tool":
        return Reply(f"It is {text}")
    return Reply(tools=(("add", {"a": int(text.split()[0])}),))


def with_tools(task: Any, client: Any, model: str) -> float:
    messages: list[Any] = [{"role": "user", "content": task.question}]
    tools: Any = [{"type": "function", "function": ADD}]
    for _ in range(3):
        message = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(str(task.answer) in message.content)
        for call in message.tool_calls:
            result = str(2 * json.loads(call.function.arguments)["a"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


@agl.rollout
def by_llm(task: Any, llm: agl.LLM) -> float:
    """Calls the model that it is given."""
    return with_tools(task, OpenAI(base_url=llm.endpoint, api_key=llm.api_key), llm.model)


@agl.rollout
def own_client(task: Any) -> float:
    """Has a client and key of its own, which routing replaces."""
    return with_tools(task, OpenAI(base_url="http://127.0.0.1:1/v1", api_key="its-own", max_retries=0), "gpt-x")


@agl.rollout
async def emits(task: Any, llm: agl.LLM) -> None:
    """Streams, and emits its rewards."""
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        messages: Any = [{"role": "user", "content": task.question}]
        text = ""
        async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
    agl.emit_reward(0.25)
    agl.emit_reward(0.5 * (str(task.answer) in text))


@pytest.mark.parametrize("agent", [by_llm, own_client], ids=["llm", "own client"])
def test_verifiers_evaluates_an_agent_with_tools(agent: Any) -> None:
    outputs, seen = evaluate(agl.environments.as_verifiers(agent, TASKS), calculator)
    assert [o["reward"] for o in outputs] == [1.0] * 3
    assert [len(o["trajectory"]) for o in outputs] == [2] * 3
    assert {r.body["model"] for r in seen} == {"trained-model"}
    assert {r.headers["authorization"] for r in seen} == {"Bearer k"}
    assert all(r.body["tools"][0]["function"]["name"] == "add" for r in seen)
    assert [m["role"] for m in outputs[0]["completion"]] == ["assistant", "tool", "assistant"]
    assert outputs[0]["prompt"][0]["content"] == "3 + 3"
    assert not any(o["error"] for o in outputs)


def test_rewards_that_are_emitted_add_up_and_answers_stream() -> None:
    def right(body: dict[str, Any]) -> Reply:
        return Reply(str(2 * int(last_said(body)[1].split()[0])) if "3" in last_said(body)[1] else "no idea")

    outputs, _ = evaluate(agl.environments.as_verifiers(emits, TASKS), right, rollouts_per_example=2)
    assert [o["reward"] for o in outputs] == [0.75, 0.75, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_agents_of_other_dialects(dialect: str) -> None:
    @agl.rollout
    def agent(task: Any, llm: agl.LLM) -> float:
        if dialect == "responses":
            client: Any = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
            text = client.responses.create(model="m", input=task.question).output_text
        else:
            import anthropic

            client = anthropic.Anthropic(base_url=llm.endpoint.removesuffix("/v1"), api_key=llm.api_key)
            sent: Any = [{"role": "user", "content": task.question}]
            text = client.messages.create(model="m", max_tokens=9, messages=sent).content[0].text
        return float(text == "six")

    outputs, seen = evaluate(agl.environments.as_verifiers(agent, TASKS[:1]), says("six"))
    assert [o["reward"] for o in outputs] == [1.0]
    assert seen[0].path.endswith("/chat/completions")


def fails(error: Callable[[], Exception], **options: Any) -> Any:
    @agl.rollout(**options)
    def agent(task: Any, llm: agl.LLM) -> float:
        OpenAI(base_url=llm.endpoint, api_key=llm.api_key).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        raise error()

    return agl.environments.as_verifiers(agent, TASKS[:1])


def test_an_agent_that_breaks_is_an_infrastructure_error() -> None:
    ((output,), _) = evaluate(fails(lambda: RuntimeError("the tool server is gone")), says("x"))
    assert output["error"]["error"] == "InfraError"
    assert "the tool server is gone" in output["error"]["error_chain_repr"]
    ((output,), _) = evaluate(fails(lambda: RuntimeError("gone"), error_reward=-1.0), says("x"))
    assert (output["error"], output["reward"]) == (None, -1.0)


def test_a_model_that_cannot_be_reached_is_verifiers_own_error() -> None:
    ((output,), _) = evaluate(agl.environments.as_verifiers(by_llm, TASKS[:1]), lambda body: Reply(status=500))
    assert output["error"]["error"] == "ModelError"


@pytest.mark.timeout(50)
@pytest.mark.parametrize("parallel", [True, False], ids=["waiting", "later"])
def test_turns_are_limited_and_the_agent_is_ended(parallel: bool) -> None:
    """Whether its other requests wait at the rollout's end or come after it."""

    @agl.rollout
    def agent(task: Any, llm: agl.LLM) -> float:
        client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)

        def ask(_: int) -> None:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "3 + 3"}])
            time.sleep(0 if parallel else 0.5)

        with ThreadPoolExecutor(4 if parallel else 1) as threads:
            list(threads.map(ask, range(4)))
        return 1.0

    outputs, seen = evaluate(agl.environments.as_verifiers(agent, TASKS[:1], max_turns=1), calculator)
    assert [(o["reward"], o["error"], o["stop_condition"]) for o in outputs] == [(0.0, None, "max_turns_reached")]
    assert len(seen) == 1


def test_bad_tasks() -> None:
    with pytest.raises(DatasetError, match="no tasks"):
        agl.environments.as_verifiers(by_llm, [])
    with pytest.raises(DatasetError, match="no JSON"):
        agl.environments.as_verifiers(by_llm, [{"x": object()}])


def test_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/environments.md: a LangChain agent, loaded as verifiers loads an environment."""
    pytest.importorskip("langchain_openai", reason="langchain is not installed")
    import documents
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    (text,) = [b.text for b in documents.blocks() if b.what.endswith("as_verifiers.py::test_the_page")]

    def add(a: int) -> str:
        """Double a number."""
        return str(2 * a)

    monkeypatch.setenv("OPENAI_API_KEY", "its own")
    module: Any = types.ModuleType("my_env")
    module.agl, module.tasks = agl, TASKS
    module.my_agent = create_agent(ChatOpenAI(model="gpt-4o-mini"), tools=[add], name="doubler")
    module.score = lambda task, output: float(str(task["answer"]) in output)
    exec(text, vars(module))
    monkeypatch.setitem(sys.modules, "my_env", module)
    outputs, seen = evaluate(vf.load_environment("my_env"), calculator)
    assert [o["reward"] for o in outputs] == [1.0] * 3
    assert [len(o["trajectory"]) for o in outputs] == [2] * 3
    assert {r.headers["authorization"] for r in seen} == {"Bearer k"}
