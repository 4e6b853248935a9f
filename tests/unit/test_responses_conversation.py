"""Conversations in the Responses dialect: every prompt is the one before plus what was sampled, exactly."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import openai
import pytest
from scripted import ScriptedEngine, in_loop, quick_tokenizer, serving, tool_call
from test_responses import THOUGHT, TOOLS, ask
from tiny_tokenizers import template_tokenizer

from agl import tracing
from agl.errors import EngineError
from agl.mdp.selection import select
from agl.mdp.types import Call
from agl.tracing import sdk_hooks as routing
from agl.trainer.gateway.stored_responses import StoredResponses


def drifts_by_nothing(calls: list[Call]) -> None:
    for before, after in itertools.pairwise(calls):
        assert (after.parent_id, after.fork_cause) == (before.id, None)
        np.testing.assert_array_equal(after.prompt_ids[: before.ids.size], before.ids)


def _turns(n: int) -> list[str]:
    """Per turn a tool call, with spaces in its JSON that a client drops when it writes it again, and an answer."""
    lines = []
    for i in range(n):
        call = tool_call(f"{i} + {i}")
        lines += [call.replace('"arguments": ', '"arguments":   '), f"It is {2 * i} — naïvely  "]
    return lines


@in_loop
async def test_ten_turns_by_previous_response_id_drift_by_nothing():
    async with serving(ScriptedEngine(quick_tokenizer(), _turns(10), caches=True)) as rig:
        attempt = await rig.attempt()
        previous = None
        for i in range(10):
            options: dict[str, Any] = {"tools": TOOLS, "instructions": "use the calculator"}
            called = await ask(attempt, f"what is {i} and {i}?", previous_response_id=previous, **options)
            call = called.output[-1]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": str(2 * i)}
            answer = await ask(attempt, [result], previous_response_id=called.id, **options)
            assert answer.previous_response_id == called.id
            assert answer.usage.input_tokens_details.cached_tokens > 0
            previous = answer.id
        calls = await attempt.close()
    assert len(calls) == 20
    drifts_by_nothing(calls)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_ten_turns_of_a_client_that_sends_its_history_drift_by_nothing(stream):
    async with serving(_turns(10)) as rig:
        attempt = await rig.attempt()
        items: list[Any] = []

        async def go_on(*new: Any) -> Any:
            items.extend(new)
            if stream:
                async with attempt.client().responses.stream(model="m", input=items, tools=TOOLS, store=False) as s:
                    answer = await s.get_final_response()
            else:
                answer = await ask(attempt, items, tools=TOOLS, store=False)
            items.extend(item.model_dump() for item in answer.output)
            return answer.output[-1]

        for i in range(10):
            call = await go_on({"role": "user", "content": [{"type": "input_text", "text": f"{i} and {i}?"}]})
            await go_on({"type": "function_call_output", "call_id": call.call_id, "output": str(2 * i)})
        calls = await attempt.close()
    assert len(calls) == 20
    drifts_by_nothing(calls)


@in_loop
async def test_a_client_that_drops_ids_reasoning_and_output_parts_continues_as_well():
    thinks = [THOUGHT + "Two things." + tool_call("1") + tool_call("2"), THOUGHT + "done"]
    async with serving(thinks, template_tokenizer("qwen3")) as rig:
        attempt = await rig.attempt()
        asked = {"role": "user", "content": "go"}
        said, *calls = (await ask(attempt, [asked], tools=TOOLS)).output[1:]
        made = [
            {"type": "function_call", "call_id": c.call_id, "name": c.name, "arguments": c.arguments} for c in calls
        ]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": c.call_id, "output": [{"type": "input_text", "text": "1"}]}
            for c in calls
        ]
        text = {"role": "assistant", "content": said.content[0].text}
        assert (await ask(attempt, [asked, text, *made, *results], tools=TOOLS)).output_text == "done"
        drifts_by_nothing(await attempt.close())


@in_loop
async def test_items_are_referred_to_by_id():
    async with serving([tool_call("1"), "done"]) as rig:
        attempt = await rig.attempt()
        (call,) = (await ask(attempt, tools=TOOLS)).output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        reference = {"type": "item_reference", "id": call.id}
        await ask(attempt, [{"role": "user", "content": "hello"}, reference, result], tools=TOOLS)
        with pytest.raises(openai.NotFoundError, match="'fc_1' not found"):
            await ask(attempt, [{"type": "item_reference", "id": "fc_1"}])
        drifts_by_nothing((await attempt.close())[:2])


@in_loop
async def test_a_response_branches_and_instructions_are_not_carried_over():
    async with serving(["one", "two", "three", "four"]) as rig:
        attempt = await rig.attempt()
        first = await ask(attempt, "a", instructions="be brief")
        await ask(attempt, "b", instructions="be brief", previous_response_id=first.id)
        await ask(attempt, "c", instructions="be brief", previous_response_id=first.id)
        await ask(attempt, "d", previous_response_id=first.id)
        calls = await attempt.close()
    assert [c.parent_id for c in calls] == [None, first.id, first.id, None]
    assert calls[3].fork_cause == "trimmed"
    assert "be brief" not in quick_tokenizer().decode(calls[3].prompt_ids)


@in_loop
async def test_an_unknown_response_is_not_found():
    async with serving(["one", EngineError("broken"), "two"]) as rig:
        attempt, other = await rig.attempt(), await rig.attempt()
        elsewhere = await ask(other)
        with pytest.raises(openai.InternalServerError):
            await ask(attempt)
        unstored = await ask(attempt, store=False)
        for response_id in ("resp_unknown", elsewhere.id, unstored.id):
            with pytest.raises(openai.BadRequestError, match="not found") as told:
                await ask(attempt, previous_response_id=response_id)
            assert (told.value.code, told.value.param) == ("previous_response_not_found", "previous_response_id")
        calls = await attempt.close()
    assert [c.finish_reason for c in calls] == ["error", "stop", "error", "error", "error"]


def test_a_history_that_is_sent_again_is_kept_once():
    stored = StoredResponses()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for response_id in ("resp_1", "resp_2"):
        response = {"id": response_id, "output": [], "tools": [dict(TOOLS[0])], "instructions": None, "text": {}}
        stored.add(response, None, [dict(m) for m in messages], [dict(m) for m in messages])
    first, second = (stored.get(i) for i in ("resp_1", "resp_2"))
    assert first.conversation() == second.conversation() == messages
    kept = [(*r.conversation(), *r.input, r.response["tools"]) for r in (first, second)]
    assert all(a is b for a, b in zip(*kept, strict=True))


@pytest.mark.parametrize("style", ["history", "previous_response_id"])
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_openai_agents_with_a_tool(stream, style):
    agents = pytest.importorskip("agents")

    @agents.function_tool
    def calculator(expression: str) -> str:
        """Work out a sum."""
        left, right = expression.split(" + ")
        return str(int(left) + int(right))

    async with serving([tool_call("1 + 2"), "It is 3.", tool_call("3 + 4"), "It is 7."]) as rig:
        attempt = await rig.attempt()
        access = attempt.access
        context = tracing.RolloutContext(
            access.rollout_id, access.attempt, "solver", select(None), rig.gateway.base_url, attempt.key
        )
        client = openai.AsyncOpenAI(base_url="http://provider.invalid/v1", api_key="sk-provider")
        provider = agents.OpenAIProvider(openai_client=client)
        config = agents.RunConfig(model_provider=provider, tracing_disabled=True)
        agent = agents.Agent("solver", instructions="Use the calculator.", tools=[calculator])

        async def run(input: Any, previous: str | None) -> Any:
            chained = {"previous_response_id": previous, "auto_previous_response_id": style == "previous_response_id"}
            if not stream:
                return await agents.Runner.run(agent, input, run_config=config, **chained)
            result = agents.Runner.run_streamed(agent, input, run_config=config, **chained)
            async for _ in result.stream_events():
                pass
            return result

        routing.install()
        try:
            with tracing.running(context):
                first = await run("what is 1 + 2?", None)
                if style == "history":
                    second = await run([*first.to_input_list(), {"role": "user", "content": "and 3 + 4?"}], None)
                else:
                    second = await run("and 3 + 4?", first.last_response_id)
        finally:
            routing.uninstall()
        calls = await attempt.close()
    assert (first.final_output, second.final_output) == ("It is 3.", "It is 7.")
    assert [c.agent for c in calls] == ["solver"] * 4
    drifts_by_nothing(calls)
    assert [m["role"] for m in calls[1].request["messages"]] == ["tool"]
