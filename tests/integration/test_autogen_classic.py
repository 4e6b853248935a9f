"""Classic AutoGen (`ConversableAgent`): names, tools and structure of chats, group chats and async chats."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

pytest.importorskip("autogen.agentchat")

from autogen import (  # pyright: ignore[reportMissingImports]
    ConversableAgent,
    GroupChat,
    GroupChatManager,
    register_function,
)

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


@pytest.fixture(autouse=True)
def _vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes for tokens: older releases count a stream's tokens themselves, by a vocabulary from the internet."""
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.registry import ENCODINGS

    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setitem(ENCODINGS, "cl100k_base", encoding)


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with AutoGenTracer(), tracing.running(context):
        yield context


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]


def config(url: str, **options: Any) -> Any:
    # Older releases count a stream's tokens themselves, for models that they know.
    model = {"model": "gpt-4", "base_url": url, "api_key": KEY, **options}
    return {"config_list": [model], "cache_seed": None}


def speaker(url: str, name: str, **options: Any) -> ConversableAgent:
    return ConversableAgent(name, llm_config=config(url, **options), human_input_mode="NEVER")


def pair(url: str, tool: Callable[..., Any] = add, **options: Any) -> tuple[ConversableAgent, ConversableAgent]:
    """An agent that asks for `add`, and the one that executes it."""
    solver = speaker(url, "solver", **options)
    user = ConversableAgent(
        "user",
        llm_config=False,
        human_input_mode="NEVER",
        is_termination_msg=lambda m: str(m.get("content") or "").startswith("sum"),
    )
    register_function(tool, caller=solver, executor=user, name="add", description="Add.")
    return solver, user


def chat(url: str, way: str, task: str = "2+3", tool: Callable[..., Any] = add) -> str:
    solver, user = pair(url, tool, **({"stream": True} if way == "stream" else {}))
    if way == "async":
        result = asyncio.run(user.a_initiate_chat(solver, message=task, silent=True))
    else:
        result = user.initiate_chat(solver, message=task, silent=True)
    return result.chat_history[-1]["content"].strip()


@pytest.mark.parametrize("way", ["sync", "async", "stream"])
def test_each_agent_speaks_and_executes_under_its_name(provider: Provider, rollout: RolloutContext, way: str) -> None:
    assert chat(provider.url, way) == "sum 5"
    assert [s.agent for s in of(rollout, semconv.CHAT)] == ["solver", "solver"]
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert (tool.agent, tool.name, tool.status) == ("user", "execute_tool add", "unset")
    assert json.loads(tool.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"a": 2, "b": 3}
    assert tool.attributes[semconv.TOOL_CALL_RESULT] == "5"
    assert tool.attributes[semconv.TOOL_CALL_ID] == provider.last.body["messages"][-1]["tool_call_id"]
    by_id = {s.span_id: s for s in rollout.spans}
    for span in [*of(rollout, semconv.CHAT), tool]:
        parent = by_id[span.parent_id or ""]
        assert (parent.operation, parent.agent) == (semconv.INVOKE_AGENT, span.agent)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_failing_tool_is_recorded(provider: Provider, rollout: RolloutContext, way: str) -> None:
    provider.script = uses_add(a=-1)
    assert "a is negative" in chat(provider.url, way)
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert tool.status == "error"
    assert "a is negative" in tool.attributes[semconv.TOOL_CALL_RESULT]


class Stock(BaseModel):
    items: int
    error: str | None = None


@pytest.mark.parametrize(
    ("returned", "failed"),
    [
        ({"error": "sold out"}, True), (Stock(items=0, error="sold out"), True), ("Error: sold out", True),
        ({"error": None}, False), (Stock(items=3), False), ({"errors": []}, False),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_tool_returned_tells_its_outcome(
    provider: Provider, rollout: RolloutContext, returned: Any, failed: bool
) -> None:
    def stock(a: int, b: int) -> Any:
        return returned

    chat(provider.url, "sync", tool=stock)
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert tool.status == ("error" if failed else "unset")


def test_an_async_tool_in_a_sync_chat(provider: Provider, rollout: RolloutContext) -> None:
    async def slow(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    assert chat(provider.url, "sync", tool=slow) == "sum 5"
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert (tool.agent, tool.attributes[semconv.TOOL_CALL_RESULT]) == ("user", "5")


def test_members_of_a_group_chat_speak_in_their_manager(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: Reply("fine")
    members = [speaker(provider.url, n) for n in ("a", "b")]
    group = GroupChat(agents=[*members], messages=[], max_round=3, speaker_selection_method="round_robin")
    manager = GroupChatManager(groupchat=group, llm_config=config(provider.url), silent=True)
    members[0].initiate_chat(manager, message="go", silent=True)
    assert [s.agent for s in of(rollout, semconv.CHAT)] == ["b", "a"]
    names = {s.span_id: s.agent for s in of(rollout, semconv.INVOKE_AGENT)}
    assert {names[s.parent_id or ""] for s in of(rollout, semconv.INVOKE_AGENT) if s.agent in ("a", "b")} == {
        "chat_manager"
    }


def test_a_failed_call_is_raised_unchanged(provider: Provider, rollout: RolloutContext) -> None:
    import openai

    provider.script = lambda body: Reply(status=400)
    with pytest.raises(openai.BadRequestError):
        chat(provider.url, "sync")
    assert {s.status for s in of(rollout, semconv.CHAT)} == {"error"}


@pytest.mark.parametrize("way", ["sync", "async"])
def test_twenty_rollouts_in_threads_never_mix(provider: Provider, way: str) -> None:
    rollouts = [RolloutContext(f"ro-{i:02}", 1, "outer", select(None), provider.root, "agl-key") for i in range(20)]
    barrier = threading.Barrier(len(rollouts))

    def run(rollout: RolloutContext) -> None:
        barrier.wait(10)
        with tracing.running(rollout):
            chat("http://provider.invalid/v1", way, rollout.rollout_id)

    with AutoGenTracer():
        threads = [threading.Thread(target=run, args=(r,)) for r in rollouts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rollout in rollouts:
        mine = [s for s in provider.seen if f"/rollouts/{rollout.rollout_id}/" in s.path]
        assert [rollout.rollout_id in json.dumps(s.body["messages"]) for s in mine] == [True, True]
        assert all("/agents/solver/" in s.path for s in mine)
        assert [s.traceparent_span for s in mine] == [s.span_id for s in of(rollout, semconv.CHAT)]
        assert len(of(rollout, semconv.EXECUTE_TOOL)) == 1
        assert {s.rollout_id for s in rollout.spans} == {rollout.rollout_id}


def test_uninstrument_restores(provider: Provider) -> None:
    names = ("generate_reply", "a_generate_reply", "execute_function", "a_execute_function", "__init_subclass__")
    before = [vars(ConversableAgent).get(n) for n in names]
    tracer = AutoGenTracer().instrument()
    assert [vars(ConversableAgent).get(n) for n in names] != before
    assert chat(provider.url, "sync") == "sum 5"
    tracer.uninstrument()
    assert [vars(ConversableAgent).get(n) for n in names] == before


def test_a_function_of_the_task_is_wrapped(provider: Provider) -> None:
    agent = wrap(lambda task: chat(provider.url, "sync", task), lambda task, output: len(output), name="solver")
    done: Any = agent.run("2+3", {}, RolloutInfo("ro", 1))
    assert done == Outcome(5, "sum 5")
