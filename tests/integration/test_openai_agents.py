"""The OpenAI Agents SDK: names, tools and structure, through handoffs, agents as tools, guardrails and streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    InputGuardrailTripwireTriggered,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    RunHooks,
    Runner,
    UserError,
    function_tool,
    response_span,
    set_trace_processors,
    set_trace_provider,
    set_tracing_disabled,
    trace,
)
from agents.tracing import TracingProcessor, get_current_span, get_current_trace, get_trace_provider, setup
from agents.tracing.provider import DefaultTraceProvider
from agents.tracing.traces import NoOpTrace
from agents.version import __version__ as version
from openai import AsyncOpenAI
from packaging.version import Version
from scripted import in_loop, serving, tool_call
from subject_openai_agents import chat_model, responses_model

import agl
from agl import semconv, tracing
from agl.adapters.openai_agents import OpenAIAgentsTracer, wrap
from agl.agents.agent import RolloutInfo
from agl.mdp.builder import build_trajectory
from agl.mdp.outcomes import tool_outcomes
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.messages import read
from agl.testing.provider import Provider, Reply, says, serve
from agl.testing.subject import ToolFailed, add, tool_result, uses_add
from agl.tracing.context import RolloutContext


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with OpenAIAgentsTracer(), tracing.running(context):
        yield context


class Seen(TracingProcessor):
    """A user's own processor."""

    def __init__(self) -> None:
        self.spans: list[str] = []

    def on_trace_start(self, trace: Any) -> None: ...
    def on_trace_end(self, trace: Any) -> None: ...
    def on_span_start(self, span: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...

    def on_span_end(self, span: Any) -> None:
        self.spans.append(span.span_data.type)


@pytest.fixture(autouse=True)
def users() -> Iterator[Seen]:
    """The only processor, so that no test sends anything."""
    before: Any = get_trace_provider()
    processors = before._multi_processor._processors
    seen = Seen()
    set_trace_processors([seen])
    yield seen
    set_trace_processors([*processors])
    set_tracing_disabled(False)


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]


def agents(rollout: RolloutContext) -> list[str | None]:
    return [s.agent for s in of(rollout, semconv.CHAT)]


def by_prompt(**answers: Callable[[dict[str, Any]], Reply]) -> Callable[[dict[str, Any]], Reply]:
    """A policy for each agent, told apart by its instructions."""
    return lambda body: answers[body["messages"][0]["content"]](body)


def agent(name: str, provider: Provider, **options: Any) -> Agent[Any]:
    return Agent(name=name, instructions=name, model=chat_model(provider.url), **options)


def run(starting: Agent[Any], question: str = "2+3", **options: Any) -> Any:
    return asyncio.run(Runner.run(starting, question, **options)).final_output


@pytest.mark.parametrize("decision", ["approved", "rejected", "unanswered"])
@pytest.mark.parametrize("waits", ["helper", "tool"])
def test_an_agent_that_is_a_tool_has_not_run_while_somebody_is_asked(
    waits: str, decision: str, provider: Provider, rollout: RolloutContext
) -> None:
    helper = agent("helper", provider, tools=[function_tool(add, needs_approval=waits == "tool")])
    delegate = helper.as_tool("delegate", "Ask the helper.", needs_approval=waits == "helper")
    boss = agent("boss", provider, tools=[delegate])

    def ask_helper(body: dict[str, Any]) -> Reply:
        text = tool_result(body)
        return Reply(None, (("delegate", {"input": "2+3"}),)) if text is None else Reply(f"boss: {text}")

    provider.script = by_prompt(boss=ask_helper, helper=uses_add())

    async def decide() -> None:
        paused = await Runner.run(boss, "2+3")
        state = paused.to_state()
        for item in paused.interruptions:
            if decision == "approved":
                state.approve(item)
            elif decision == "rejected":
                state.reject(item)
        if decision != "unanswered":
            resumed = await Runner.run(boss, state)
            assert resumed.final_output.startswith("boss: ")
            assert not resumed.interruptions

    asyncio.run(decide())
    outcomes = tool_outcomes(SpanIndex((), rollout.spans))
    ran = {"approved": {"add", "delegate"}, "rejected": {"delegate"} if waits == "tool" else set()}.get(decision, set())
    assert {o.tool for o in outcomes if o.error is None} == ran
    assert len(outcomes) == len({o.tool_call_id for o in outcomes} - {None})


def test_a_handoff_changes_the_name_and_both_are_agents_of_the_run(provider: Provider, rollout: RolloutContext) -> None:
    writer = agent("writer", provider, tools=[function_tool(add)])
    triage = agent("triage", provider, handoffs=[writer])

    def write(body: dict[str, Any]) -> Reply:
        return uses_add()({**body, "messages": [m for m in body["messages"] if "assistant" not in str(m["content"])]})

    provider.script = by_prompt(triage=lambda _: Reply(None, (("transfer_to_writer", {}),)), writer=write)
    assert run(triage) == "sum 5"
    assert agents(rollout) == ["triage", "writer", "writer"]
    first, second = of(rollout, semconv.INVOKE_AGENT)
    assert [(s.agent, s.parent_id) for s in (first, second)] == [
        ("triage", first.parent_id),
        ("writer", first.parent_id),
    ]
    assert [s.parent_id for s in of(rollout, semconv.CHAT)] == [first.span_id, second.span_id, second.span_id]
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert (span.agent, span.parent_id) == ("writer", second.span_id)


def test_calls_name_the_group_of_their_trace_as_conversation(provider: Provider, rollout: RolloutContext) -> None:
    solver = agent("solver", provider, tools=[function_tool(add)])
    run(solver, run_config=RunConfig(group_id="thread-1"))
    run(solver)
    assert [s.attributes.get(semconv.CONVERSATION_ID) for s in of(rollout, semconv.CHAT)] == ["thread-1"] * 2 + [
        None
    ] * 2


def test_an_agent_as_a_tool_lies_in_its_tool_call(provider: Provider, rollout: RolloutContext) -> None:
    helper = agent("helper", provider, tools=[function_tool(add)])
    boss = agent("boss", provider, tools=[helper.as_tool("delegate", "Ask the helper.")])

    def delegate(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("done")
        return Reply(None, tuple(("delegate", {"input": f"{i}"}) for i in range(3)))

    provider.script = by_prompt(boss=delegate, helper=uses_add())
    assert run(boss) == "done"
    assert sorted(agents(rollout), key=str) == ["boss"] * 2 + ["helper"] * 6
    by_id = {s.span_id: s for s in rollout.spans}
    calls = {s.attributes[semconv.TOOL_CALL_ID] for s in of(rollout, semconv.EXECUTE_TOOL) if s.agent == "boss"}
    assert calls == {c["id"] for c in provider.last.body["messages"][2]["tool_calls"]}
    for span in of(rollout, semconv.CHAT) + of(rollout, semconv.EXECUTE_TOOL):
        parent = by_id[span.parent_id or ""]
        assert (parent.operation, parent.agent) == (semconv.INVOKE_AGENT, span.agent)
        if span.agent == "helper":
            assert by_id[parent.parent_id or ""].name == "execute_tool delegate"


def test_parallel_tool_calls_are_joined_to_their_calls(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("done")
        return Reply(None, tuple(("slow_add", {"a": k, "b": 1}) for k in (3, 2, 1, 0)))

    provider.script = script

    @function_tool
    async def slow_add(a: int, b: int) -> int:
        """Add."""
        for _ in range(a):
            await asyncio.sleep(0)
        agl.emit_reward(float(a))
        return a + b

    run(agent("solver", provider, tools=[slow_add]))
    spans = {s.attributes[semconv.TOOL_CALL_ID]: s for s in of(rollout, semconv.EXECUTE_TOOL)}
    rewards = {s.parent_id: s.attributes[semconv.REWARD_VALUE] for s in of(rollout, semconv.REWARD)}
    said = next(m for m in provider.last.body["messages"] if m.get("tool_calls"))["tool_calls"]
    assert spans.keys() == {c["id"] for c in said}
    for call in said:
        arguments = json.loads(call["function"]["arguments"])
        span = spans[call["id"]]
        assert json.loads(span.attributes[semconv.TOOL_CALL_ARGUMENTS]) == arguments
        assert span.attributes[semconv.TOOL_CALL_RESULT] == str(arguments["a"] + 1)
        assert rewards[span.span_id] == arguments["a"]


def test_a_guardrails_agent_is_named_and_its_alarm_goes_on(provider: Provider, rollout: RolloutContext) -> None:
    guard = agent("guard", provider)

    async def check(context: Any, of_agent: Any, given: Any) -> GuardrailFunctionOutput:
        said = (await Runner.run(guard, "check")).final_output
        return GuardrailFunctionOutput(said, tripwire_triggered=said == "stop")

    solver = agent("solver", provider, input_guardrails=[InputGuardrail(check)])
    provider.script = by_prompt(guard=says("fine"), solver=says("hello"))
    assert run(solver) == "hello"
    assert sorted(agents(rollout), key=str) == ["guard", "solver"]
    by_id = {s.span_id: s for s in rollout.spans}
    [inner] = [s for s in of(rollout, semconv.INVOKE_AGENT) if s.agent == "guard"]
    assert by_id[inner.parent_id or ""].name == "invoke_agent solver"
    provider.script = by_prompt(guard=says("stop"), solver=says("hello"))
    with pytest.raises(InputGuardrailTripwireTriggered):
        run(solver)
    assert "guard" in agents(rollout)[-2:]


def test_an_error_that_the_sdk_tells_the_model_is_an_error_of_the_tools_span_only(
    provider: Provider, rollout: RolloutContext
) -> None:
    provider.script = uses_add(a=-1)
    assert "error" in run(agent("solver", provider, tools=[function_tool(add)]))
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert (span.status, span.status_message) == ("error", "ToolFailed: a is negative")
    assert span.attributes[semconv.ERROR_TYPE] == "ToolFailed"
    assert {s.status for s in rollout.spans if s is not span} == {"unset"}


def test_a_run_within_an_exceptions_handler_is_not_to_blame_for_it(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        try:
            raise ToolFailed("earlier")
        except ToolFailed:
            await Runner.run(agent("solver", provider, tools=[function_tool(add)]), "2+3")

    asyncio.run(main())
    assert len(of(rollout, semconv.CHAT)) == 2
    assert {s.status for s in rollout.spans} == {"unset"}


def test_a_tools_exception_leaves_as_the_sdk_raises_it(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = uses_add(a=-1)
    with pytest.raises(UserError) as caught:
        run(agent("solver", provider, tools=[function_tool(add, failure_error_function=None)]))
    assert isinstance(caught.value.__cause__, ToolFailed)
    assert {s.attributes[semconv.ERROR_TYPE] for s in rollout.spans if s.status == "error"} == {"ToolFailed"}


def test_a_stream_broken_off_leaves_the_rest_in_order(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        result = Runner.run_streamed(agent("first", provider, tools=[function_tool(add)]), "2+3")
        async for _ in result.stream_events():
            break
        result.cancel()
        await Runner.run(agent("second", provider), "hi")

    asyncio.run(main())
    assert agents(rollout)[-1] == "second"
    second = of(rollout, semconv.INVOKE_AGENT)[-1]
    assert of(rollout, semconv.CHAT)[-1].parent_id == second.span_id
    assert second.parent_id not in {s.span_id for s in of(rollout, semconv.INVOKE_AGENT)}


def test_responses_tell_their_ids(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = says("hello")
    assert run(Agent(name="solver", model=responses_model(provider.url))) == "hello"
    [chat] = of(rollout, semconv.CHAT)
    assert (chat.agent, chat.attributes[semconv.RESPONSE_ID]) == ("solver", "resp_1")
    assert list(chat.attributes[semconv.FINISH_REASONS]) == ["stop"]
    assert (chat.attributes[semconv.INPUT_TOKENS], chat.attributes[semconv.WIRE_CALLS]) == (7, 1)
    assert "hello" in chat.attributes[semconv.OUTPUT_MESSAGES]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("how", ["globally", "for the run", "for a run in a trace"])
def test_all_is_recorded_where_the_sdks_tracing_is_off(
    provider: Provider, users: Seen, how: str, streamed: bool
) -> None:
    solver = agent("solver", provider, tools=[function_tool(add)])
    rollout = RolloutContext("ro", 1, "outer", select(None))
    config = None if how == "globally" else RunConfig(tracing_disabled=True)
    set_tracing_disabled(how == "globally")

    async def stream() -> None:
        async for _ in Runner.run_streamed(solver, "2+3", run_config=config).stream_events():
            pass

    def go() -> list[str]:
        with trace("of the user") if how == "for a run in a trace" else contextlib.nullcontext():
            if streamed:
                asyncio.run(stream())
            else:
                run(solver, run_config=config)
        told = [*users.spans]
        users.spans.clear()
        return told

    # Before 0.24 a run in a trace is traced whatever its configuration says.
    without = go()
    with OpenAIAgentsTracer(), tracing.running(rollout):
        assert go() == without
    assert agents(rollout) == ["solver", "solver"]
    [tool], [asked, told] = of(rollout, semconv.EXECUTE_TOOL), of(rollout, semconv.CHAT)
    assert tool.agent == "solver"
    assert how == "for a run in a trace" or without == []
    if without:
        return
    [call] = [c for m in read.said(asked) for c in m.tool_calls]
    assert tool.attributes[semconv.TOOL_CALL_ID] == call.id
    assert [m.text.strip() for m in read.said(told)] == ["sum 5"]


def test_the_users_processors_see_what_they_ever_saw(provider: Provider, users: Seen) -> None:
    solver = agent("solver", provider, tools=[function_tool(add)])
    run(solver)
    alone, users.spans = users.spans, []
    rollout = RolloutContext("ro", 1, "outer", select(None))
    with OpenAIAgentsTracer(), tracing.running(rollout):
        run(solver)
    assert users.spans == alone
    # Replacing the processors while we are on is the user's affair, and leaves ours.
    rollout = RolloutContext("ro", 1, "outer", select(None))
    with OpenAIAgentsTracer(), tracing.running(rollout):
        set_trace_processors([])
        run(solver)
    assert users.spans == alone
    assert agents(rollout) == ["solver", "solver"]


def test_outside_a_rollout_tracing_that_is_off_stays_off(provider: Provider, users: Seen) -> None:
    set_tracing_disabled(True)
    with OpenAIAgentsTracer():
        run(agent("solver", provider))
        with trace("of the user") as made:
            assert made.trace_id == "no-op"
    assert users.spans == []


def test_wrapped_agents_take_a_question_and_give_the_final_output(provider: Provider) -> None:
    solver = agent("solver", provider, tools=[function_tool(add)])
    wrapped = wrap(solver, lambda task, output: len(output))
    done: Any = wrapped.run({"question": "2+3"}, {}, RolloutInfo("ro", 1))
    outcome = asyncio.run(done)
    assert (wrapped.name, outcome.reward, outcome.output) == ("solver", 5, "sum 5")
    counted = wrap(solver, name="x", input=lambda task: task["a"], output=lambda result: len(result.raw_responses))
    done = counted.run({"a": "2+3"}, {}, RolloutInfo("ro", 1))
    assert (counted.name, asyncio.run(done).output) == ("x", 2)
    rollout = RolloutContext("ro", 1, "solver", select(None))
    with OpenAIAgentsTracer(), tracing.running(rollout):
        run(solver)
    assert [s.name for s in of(rollout, semconv.INVOKE_AGENT)] == ["invoke_agent solver"]


def test_only_the_sdks_agents_are_ours() -> None:
    class Theirs:
        handoffs: tuple[str, ...] = ()

    Theirs.__module__ = "agents.mine"
    assert OpenAIAgentsTracer.handles(Agent(name="a"))
    assert not OpenAIAgentsTracer.handles(Theirs())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("api", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_two_agents_and_a_tools_reward_through_the_gateway(api: Any, streaming: bool) -> None:
    in_loop(check_gateway)(api, streaming)


async def check_gateway(api: Any, streaming: bool) -> None:
    model = api("m", AsyncOpenAI(base_url="http://provider.invalid/v1", api_key="k"))

    @function_tool
    def calculator(expression: str) -> str:
        """Work out a sum."""
        agl.emit_reward(0.5)
        return "2"

    writer = Agent(name="writer", instructions="Be brief.", model=model, tools=[calculator])
    triage = Agent(name="triage", instructions="Hand over.", model=model, handoffs=[writer])
    script = [
        '<tool_call>\n{"name": "transfer_to_writer", "arguments": {}}\n</tool_call>',
        tool_call("1 + 1"),
        "It is 2",
    ]
    async with serving(script) as rig:
        attempt = await rig.attempt()
        access = attempt.access
        url = access.url.partition("/rollouts/")[0]
        rollout = RolloutContext(access.rollout_id, access.attempt, "outer", select(None), url, attempt.key)
        with OpenAIAgentsTracer(), tracing.running(rollout):
            if streaming:
                result = Runner.run_streamed(triage, "1 + 1")
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(triage, "1 + 1")
        assert result.final_output == "It is 2"
        calls = await attempt.close()
        built = build_trajectory(access.rollout_id, 1, "group", SpanIndex(calls, rollout.spans), select(None))
    assert [c.agent for c in calls] == ["triage", "writer", "writer"]
    assert [c.span_id for c in calls] == [s.span_id for s in of(rollout, semconv.CHAT)]
    assert (built.bypassed, built.lost, built.n_calls) == ((), (), 3)
    [(reward, call)] = built.credited
    assert (reward.value, call) == (0.5, calls[1].id)


@pytest.mark.parametrize("way", ["run", "run_sync", "run_streamed"])
def test_a_programs_own_trace_provider_keeps_names_and_gets_its_spans(way: str, provider: Provider) -> None:
    seen = Seen()
    users = DefaultTraceProvider()
    users.set_disabled(False)
    users.register_processor(seen)
    before = get_trace_provider()
    agent = Agent(name="solver", model=chat_model(provider.url), tools=[function_tool(add)])
    context = RolloutContext("ro", 1, "outer", select(None))

    async def main() -> None:
        if way == "run":
            await Runner.run(agent, "2+3")
        else:
            async for _ in Runner.run_streamed(agent, "2+3").stream_events():
                pass

    try:
        with OpenAIAgentsTracer(), tracing.running(context):
            set_trace_provider(users)
            Runner.run_sync(agent, "2+3") if way == "run_sync" else asyncio.run(main())
        assert get_trace_provider() is users
    finally:
        set_trace_provider(before)
    assert [s.agent for s in context.spans if s.operation == semconv.CHAT] == ["solver", "solver"]
    assert [s.agent for s in context.spans if s.operation == semconv.EXECUTE_TOOL] == ["solver"]
    assert "generation" in seen.spans


def test_the_sdk_makes_its_own_provider_when_it_would_without_us(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Seen] = []
    solver = agent("solver", provider)

    def default_processor() -> Seen:
        made.append(Seen())
        return made[-1]

    monkeypatch.setattr("agents.tracing.processors.default_processor", default_processor)
    monkeypatch.setattr(setup, "GLOBAL_TRACE_PROVIDER", None)
    provider.script = says("hello")
    with OpenAIAgentsTracer():
        pass
    assert setup.GLOBAL_TRACE_PROVIDER is None
    rollout = RolloutContext("ro", 1, "outer", select(None))
    with OpenAIAgentsTracer(), tracing.running(rollout):
        set_trace_provider(DefaultTraceProvider())
        run(solver)
    assert (made, agents(rollout)) == ([], ["solver"])
    monkeypatch.setattr(setup, "GLOBAL_TRACE_PROVIDER", None)
    rollout = RolloutContext("ro", 1, "outer", select(None))
    with OpenAIAgentsTracer(), tracing.running(rollout):
        assert not made
        set_tracing_disabled(False)
        run(solver)
    assert agents(rollout) == ["solver"]
    [theirs] = made
    assert "generation" in theirs.spans
    after: Any = get_trace_provider()
    assert [*after._multi_processor._processors] == [theirs]


def test_at_exit_the_sdk_waits_no_longer_for_its_exporter(users: Seen) -> None:
    waits: list[float | None] = []

    class Slow(Seen):
        def shutdown(self, timeout: float | None = None) -> None:
            waits.append(timeout)

    set_trace_processors([Slow()])
    setup._shutdown_global_trace_provider()
    with OpenAIAgentsTracer():
        setup._shutdown_global_trace_provider()
    assert len(waits) == 2
    assert all(seconds is not None and 0 < seconds <= setup._DEFAULT_SHUTDOWN_TIMEOUT for seconds in waits)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_run_that_is_not_traced_is_to_the_program_what_it_asked_for(streamed: bool, provider: Provider) -> None:
    """Its configuration may be a dictionary, its model sees that tracing is off, and nothing has a trace."""
    seen: list[tuple[bool, str, str]] = []

    def look() -> str:
        """Look around."""
        now, span = get_current_trace(), get_current_span()
        assert now is not None
        assert span is not None
        seen.append((isinstance(now, NoOpTrace), now.trace_id, span.span_id))
        return "seen"

    async def stream(config: Any) -> None:
        async for _ in Runner.run_streamed(solver, "go", run_config=config).stream_events():
            pass

    provider.script = lambda body: Reply("done") if len(body["messages"]) > 3 else Reply(None, (("look", {}),))
    solver = agent("solver", provider, tools=[function_tool(look)])
    rollout = RolloutContext("ro", 1, "outer", select(None))
    configs: list[Any] = [RunConfig(tracing_disabled=True, group_id="thread-1")]
    if Version(version) >= Version("0.24"):
        configs.append({"tracing_disabled": True, "group_id": "thread-1"})
    for config in configs:
        with OpenAIAgentsTracer(), tracing.running(rollout):
            asyncio.run(stream(config)) if streamed else run(solver, run_config=config)
    assert seen == [(True, "no-op", "no-op")] * len(configs)
    chats = of(rollout, semconv.CHAT)
    assert {(s.agent, s.attributes[semconv.CONVERSATION_ID]) for s in chats} == {("solver", "thread-1")}


@pytest.mark.parametrize("disabled", [False, True])
def test_texts_that_spans_must_not_have_are_in_none(
    disabled: bool, provider: Provider, rollout: RolloutContext
) -> None:
    config = RunConfig(tracing_disabled=disabled, trace_include_sensitive_data=False)
    run(agent("solver", provider, tools=[function_tool(add)]), run_config=config)
    chats = of(rollout, semconv.CHAT)
    assert len(chats) == 2
    assert not any(semconv.OUTPUT_MESSAGES in chat.attributes for chat in chats)
    run(agent("solver", provider, tools=[function_tool(add)]), run_config=RunConfig(tracing_disabled=disabled))
    assert all(semconv.OUTPUT_MESSAGES in chat.attributes for chat in of(rollout, semconv.CHAT)[2:])


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def test_an_exception_without_a_message_leaves_as_it_is(provider: Provider, rollout: RolloutContext) -> None:
    class Hooks(RunHooks[Any]):
        async def on_agent_start(self, *_: Any) -> None:
            raise Speechless

    async def go() -> None:
        await Runner.run(agent("solver", provider), "2+3", hooks=Hooks())

    with pytest.raises(Speechless):
        asyncio.run(go())
    [turn] = of(rollout, semconv.INVOKE_AGENT)
    assert turn.attributes[semconv.ERROR_TYPE] == "Speechless"


def test_a_models_own_objects_do_not_disturb_the_run(rollout: RolloutContext) -> None:
    """What the adapter cannot read it leaves out."""

    def own() -> str:
        with trace("of the program"), response_span() as span:
            span.span_data.response = object()  # type: ignore[assignment]
        return "done"

    assert own() == "done"
    [chat] = of(rollout, semconv.CHAT)
    assert semconv.OUTPUT_MESSAGES not in chat.attributes
