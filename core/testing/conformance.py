"""What every adapter must do: one suite, of which a test file makes a class for its own subjects.

    class TestTinyAgents(Conformance):
        subjects = (TinyAgents(),)

Each case proves the rows of the capability matrix that its `@capability` names (`agl.testing.capabilities`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, get_args

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import agl
from agl import semconv, tracing
from agl.agents import frameworks as plugins
from agl.agents.agent import Outcome, RolloutInfo
from agl.mdp.order import in_order
from agl.mdp.outcomes import tool_outcomes
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.messages import Other, Text, ToolCall, read
from agl.messages.tool_output import tool_output
from agl.rewards.trace import Trace
from agl.testing.capabilities import Row, capability, declared_by
from agl.testing.open_calls import OpenCalls
from agl.testing.provider import Provider, Reply, Script, Seen, last_said, serve
from agl.testing.runs import ASK, context, do, instrumented, of, reads, ways
from agl.testing.subject import GAPS, KEY, NO_NUMBERS, Decision, Subject, ToolFailed, add, tool_result, uses_add
from agl.tracing.context import RolloutContext
from agl.tracing.inferred import completed

__all__ = [
    "GAPS",
    "KEY",
    "NO_NUMBERS",
    "Conformance",
    "Provider",
    "Reply",
    "Script",
    "Subject",
    "ToolFailed",
    "add",
    "last_said",
    "serve",
    "tool_result",
    "uses_add",
]

_USAGE = (semconv.INPUT_TOKENS, semconv.OUTPUT_TOKENS, semconv.CACHE_READ_TOKENS, semconv.REASONING_TOKENS)


def raises() -> Any:
    raise ToolFailed("a is negative")


@dataclasses.dataclass
class Stock:
    """What a tool returns that has classes for its results."""

    items: int
    error: str | None = None


FAILURES: Mapping[str, Callable[[], Any]] = {
    "an object with an error": lambda: {"error": "sold out"},
    "an object without success": lambda: {"success": False, "reason": "sold out"},
    "an object with its status": lambda: {"status": "failed"},
    "an object of a class": lambda: Stock(0, "sold out"),
    "JSON with an error": lambda: '{"error": "sold out"}',
    "an object as Python writes it": lambda: str({"error": "sold out"}),
    "a text": lambda: "Error: sold out",
    "text blocks": lambda: [{"type": "text", "text": "Error: sold out"}],
    "an MCP result": lambda: {"content": [{"type": "text", "text": "sold out"}], "isError": True},
    "an exception": raises,
}
"""Ways in which a tool says that it failed."""
SUCCESSES: Mapping[str, Callable[[], Any]] = {
    "no error": lambda: {"error": None, "rows": 3},
    "no errors": lambda: {"errors": []},
    "success": lambda: {"success": True, "status": "ok"},
    "an object of a class": lambda: Stock(3),
    "JSON without an error": lambda: '{"error": null, "rows": 3}',
    "an object as Python writes it": lambda: str({"error": None, "rows": 3}),
    "a text": lambda: "errors: 0",
    "text blocks": lambda: [{"type": "text", "text": "errors: 0"}],
    "an MCP result": lambda: {"content": [{"type": "text", "text": "sold out"}], "isError": False},
}
"""Results that look like failures."""


class Conformance(OpenCalls):
    """The suite; pytest runs the subclasses whose names begin with "Test".

    Attributes:
        subjects: the frameworks' agents under test.
        elsewhere: others that the capability matrix shows as they declare it, tested in separate environments.
    """

    subjects: ClassVar[Sequence[Subject]] = ()
    elsewhere: ClassVar[Sequence[Subject]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        rows: Sequence[Row] = declared_by(metafunc.function)
        needs = [row.needs for row in rows] or [None]
        subjects = [s for s in self.subjects if any(need is None or getattr(s, need) for need in needs)]
        if "way" in metafunc.fixturenames:
            each = [pytest.param(s, way, id=f"{s.name}-{way}") for s in subjects for way in ways(s)]
            metafunc.parametrize(("subject", "way"), each)
        elif "read" in metafunc.fixturenames:
            each = [pytest.param(s, read, id=f"{s.name}-{read}") for s in subjects for read in reads(s)]
            metafunc.parametrize(("subject", "read"), each)
        elif "subject" in metafunc.fixturenames:
            metafunc.parametrize("subject", subjects, ids=[s.name for s in subjects])

    @pytest.fixture
    def provider(self, subject: Subject) -> Iterator[Provider]:
        """The agent's own provider."""
        with serve(subject.script()) as server:
            yield server

    @pytest.fixture
    def gateway(self, subject: Subject) -> Iterator[Provider]:
        """Stands for the gateway, to which a selected agent's requests go."""
        with serve(subject.script()) as server:
            yield server

    @capability("the response's id and finish reason are recorded", gap="response_facts")
    @capability("every model call is a span, joined to its request by id", by_way=True)
    def test_every_call_has_a_chat_span_joined_to_the_wire_by_id(
        self, subject: Subject, way: str, provider: Provider, gateway: Provider
    ) -> None:
        agent = subject.agent(provider.url, "solver")
        with instrumented(subject), tracing.running(rollout := context(subject, gateway)):
            assert do(subject, agent, way=way) == "sum 5"
        assert provider.seen == []
        chats = of(rollout, semconv.CHAT)
        assert [s.span_id for s in chats] == [seen.traceparent_span for seen in gateway.seen]
        assert [s.agent for s in chats] == ["solver" for _ in subject.finish_reasons]
        assert all("/agents/solver/" in seen.path for seen in gateway.seen)
        for attributes in (s.attributes for s in chats):
            assert attributes[semconv.REQUEST_MODEL] == "m"
            assert attributes[semconv.PROVIDER_NAME] == subject.sdk
            # Where a framework drops the id of a stream, it comes from the wire.
            if "stream" in way or "response_facts" not in subject.gaps:
                assert str(attributes[semconv.RESPONSE_ID]).startswith(subject.response_id)
            assert attributes[semconv.WIRE_CALLS] == 1
        if "response_facts" not in subject.gaps:
            reasons = [reason for s in chats for reason in s.attributes[semconv.FINISH_REASONS]]
            assert reasons == [*subject.finish_reasons]
        assert {s.status for s in rollout.spans} == {"unset"}

    @capability("calls and tools are in order though the clock is set back")
    def test_order_and_durations_are_right_while_the_clock_is_set_back(
        self, subject: Subject, provider: Provider, gateway: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each reading of the wall clock is an hour before the last."""
        agent = subject.agent(provider.url, "solver")
        with instrumented(subject), tracing.running(context(subject, gateway)):
            now, hours = time.time_ns(), itertools.count()
            monkeypatch.setattr(time, "time_ns", lambda: now - next(hours) * 3600 * 10**9)
            do(subject, agent)
            trace = Trace.now()
            monkeypatch.undo()
        assert trace is not None
        assert [s.span_id for s in trace.calls] == [seen.traceparent_span for seen in gateway.seen]
        ran = [s.operation for s in in_order(trace.spans) if s.operation in (semconv.CHAT, semconv.EXECUTE_TOOL)]
        if subject.traces_tools == 1 and len(trace.calls) == 2:
            assert ran == [semconv.CHAT, semconv.EXECUTE_TOOL, semconv.CHAT]
        assert all(0 <= span.end - span.start < 60 for span in trace.spans)

    @capability("agents are distinguished by name", needs="names_agents")
    @capability("a tool's run is a span: name, arguments, result", needs="traces_tools")
    @capability("a tool's span has the id of the model's tool call", needs="traces_tools", gap="call_ids")
    def test_a_tool_span_tells_all_and_nests_in_its_agent(self, subject: Subject, way: str, provider: Provider) -> None:
        agent = subject.agent(provider.url, "solver")
        with instrumented(subject), tracing.running(rollout := context(subject)):
            do(subject, agent, way=way)
        agents = of(rollout, semconv.INVOKE_AGENT)
        # The innermost ends first.
        assert [s.agent for s in agents] == (["solver", "outer"] if subject.names_agents else ["solver"])
        assert [s.parent_id for s in agents] == [*(s.span_id for s in agents[1:]), None]
        assert {s.parent_id for s in of(rollout, semconv.CHAT)} == {agents[0].span_id}
        tools = of(rollout, semconv.EXECUTE_TOOL)
        assert len(tools) == subject.traces_tools
        for tool in tools:
            assert (tool.name, tool.agent, tool.parent_id) == ("execute_tool add", "solver", agents[0].span_id)
            assert tool.attributes[semconv.TOOL_NAME] == "add"
            assert tool.attributes[semconv.TOOL_TYPE] == "function"
            assert json.loads(tool.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"a": 2, "b": 3}
            assert tool.attributes[semconv.TOOL_CALL_RESULT] == "5"
            check_call_id(subject, tool, provider)

    @capability("a tool's exception is recorded and propagates unchanged", gap="tool_errors")
    @capability("a tool's exception is recorded with its type", gap="error_texts", needs="traces_tools")
    def test_a_tools_exception_is_recorded(self, subject: Subject, way: str, provider: Provider) -> None:
        provider.script = subject.script(a=-1)
        agent = subject.agent(provider.url, "solver")
        raised = raised_in(rollout := context(subject), subject, agent, way)
        if subject.traces_tools:
            check_no_tool_succeeded(rollout)
        failed = [s for s in rollout.spans if s.status == "error"]
        assert not [s for s in failed if s.operation == semconv.CHAT]
        tools = [s for s in failed if s.operation == semconv.EXECUTE_TOOL]
        assert [s.attributes[semconv.TOOL_NAME] for s in tools] == ["add"] * subject.traces_tools
        if "error_texts" not in subject.gaps:
            assert {s.attributes[semconv.ERROR_TYPE] for s in tools} <= {"ToolFailed"}
        if "tool_errors" not in subject.gaps:
            assert (type(raised), str(raised)) == (ToolFailed, "a is negative")
            agents = of(rollout, semconv.INVOKE_AGENT)
            assert {(s.status, s.attributes[semconv.ERROR_TYPE]) for s in agents} == {("error", "ToolFailed")}

    @capability(
        "a tool that reports failure without raising is recorded as failed", gap="tool_reports", needs="traces_tools"
    )
    def test_a_tool_that_reports_failure_without_raising_is_a_failure(
        self, subject: Subject, way: str, provider: Provider
    ) -> None:
        if "tool_reports" in subject.gaps:
            pytest.skip(f"{subject.name}'s tools can but raise")
        provider.script = subject.script(a=-1)
        agent = subject.reporting(provider.url, "solver")
        with instrumented(subject), tracing.running(rollout := context(subject)):
            rollout.prompts = True
            assert do(subject, agent, way=way)
        check_no_tool_succeeded(rollout)
        [tool] = of(rollout, semconv.EXECUTE_TOOL)
        assert (tool.status, tool.attributes[semconv.TOOL_NAME]) == ("error", "add")
        assert NO_NUMBERS in str(tool.attributes[semconv.TOOL_CALL_RESULT])
        check_call_id(subject, tool, provider)
        assert {s.status for s in rollout.spans if s is not tool} == {"unset"}

    @capability("what a tool returned tells its outcome, in whichever form")
    def test_what_a_tool_returned_tells_its_outcome(
        self, subject: Subject, provider: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        agent = subject.agent(provider.url, "solver")
        cases = [*((True, *case) for case in FAILURES.items()), *((False, *case) for case in SUCCESSES.items())]
        with instrumented(subject):
            for fails, what, result in cases:
                # A bare client's program ends with its tool's exception, and makes its own texts of objects.
                if not subject.traces_tools and what in ("an exception", "an object of a class"):
                    continue
                monkeypatch.setattr(f"{add.__module__}.result", result)
                rollout = context(subject)
                rollout.prompts = True
                with contextlib.suppress(ToolFailed), tracing.running(rollout):
                    do(subject, agent)
                spans = completed(rollout.spans)
                [tool] = [s for s in spans if s.operation == semconv.EXECUTE_TOOL]
                [outcome] = tool_outcomes(SpanIndex((), spans))
                assert (what, tool.status, outcome.error is not None) == (what, "error" if fails else "unset", fails)
                # Of an MCP result, some frameworks pass the text on.
                if fails and what != "an MCP result":
                    by_result = tool.attributes.get(semconv.FAILED_BY_RESULT, False)
                    assert (what, by_result) == (what, what != "an exception")
                if subject.traces_tools and what != "an exception":
                    # Some frameworks make JSON of content blocks, too.
                    texts = (tool_output(result()).text, json.dumps(result(), default=str))
                    assert tool.attributes[semconv.TOOL_CALL_RESULT] in texts

    @capability("a tool call that the framework refuses is an error, with its arguments", needs="traces_tools")
    def test_a_call_of_an_unknown_tool_is_an_error_with_its_arguments(
        self, subject: Subject, way: str, provider: Provider
    ) -> None:
        provider.script = instead_of_add(subject.script(), "no_such_tool", {"a": 2, "b": 3})
        raised = raised_in(rollout := context(subject), subject, subject.agent(provider.url, "solver"), way)
        check_no_tool_succeeded(rollout)
        refused = of(rollout, semconv.EXECUTE_TOOL)
        # Of a run that it ends, the framework tells no call.
        assert len(refused) == 1 or raised is not None
        check_refused(refused, "no_such_tool", {"a": 2, "b": 3})

    @capability("a tool call with arguments that do not fit is an error, with its arguments", needs="traces_tools")
    def test_a_call_that_does_not_fit_is_an_error_with_its_arguments(
        self, subject: Subject, provider: Provider
    ) -> None:
        provider.script = instead_of_add(subject.script(), "add", {"a": "two"})
        agent = subject.agent(provider.url, "solver")
        raised_in(rollout := context(subject), subject, agent, ways(subject)[0])
        check_no_tool_succeeded(rollout)
        refused = of(rollout, semconv.EXECUTE_TOOL)
        assert refused
        check_refused(refused, "add", {"a": "two"})

    @capability("MCP tools are traced, and their failures recorded", gap="mcp", needs="traces_tools")
    @pytest.mark.parametrize("a", [2, -1], ids=["succeeds", "fails"])
    def test_an_mcp_tool_that_says_it_failed_is_a_failure(self, subject: Subject, a: int, provider: Provider) -> None:
        if "mcp" in subject.gaps:
            pytest.skip(f"{subject.name} has no MCP tools here")
        provider.script = subject.script(a=a)
        with instrumented(subject), tracing.running(rollout := context(subject)):
            asyncio.run(subject.with_mcp(provider.url, "solver", ASK))
        [tool] = of(rollout, semconv.EXECUTE_TOOL)
        assert tool.status == ("unset" if a == 2 else "error")
        told = str(tool.attributes.get(semconv.TOOL_CALL_RESULT) or tool.status_message)
        assert ("5" if a == 2 else "a is negative") in told
        check_call_id(subject, tool, provider)

    @capability("a tool that waits for an approval has not run until it is approved", needs="approvals")
    @pytest.mark.parametrize("decision", get_args(Decision))
    def test_a_tool_that_waits_for_an_approval_has_not_run(
        self, subject: Subject, decision: Decision, provider: Provider
    ) -> None:
        rollout = context(subject)
        rollout.prompts = True
        with instrumented(subject), tracing.running(rollout):
            answer = asyncio.run(subject.with_approval(provider.url, "solver", ASK, decision))
        # Also those that are inferred from the model's requests.
        spans = completed(rollout.spans)
        index = SpanIndex((), spans)
        succeeded = [(o.tool, o.output, o.tool_call_id) for o in tool_outcomes(index) if o.error is None]
        ran = [s for s in spans if s.operation == semconv.EXECUTE_TOOL and s.is_tool_run]
        if decision == "approved":
            assert answer == "sum 5"
            [tool] = ran
            assert succeeded == [("add", "5", tool.attributes.get(semconv.TOOL_CALL_ID))]
            check_call_id(subject, tool, provider)
            return
        # What a person refuses is a failure of the call, which the model reads; what nobody has decided is nothing.
        assert not succeeded
        assert [s.status for s in ran] == (["error"] if decision == "rejected" and ran else [])
        assert len(provider.seen) == (1 if decision == "unanswered" else 2)

    @capability("equal tool calls of one answer keep their ids and results apart", needs="parallel_calls")
    def test_equal_calls_of_one_answer_keep_their_results_apart(self, subject: Subject, provider: Provider) -> None:
        provider.script = asks_twice(subject)
        begun: list[int] = []
        ended: list[int] = []

        async def add(a: int, b: int) -> str:
            """Add two numbers."""
            place = len(begun)
            begun.append(place)
            # The first call ends after the second one, where both run at once; some frameworks run one at a time.
            for _ in range(100 if place == 0 else 0):
                if ended:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.02 * (place == 0))
            ended.append(place)
            return f"result {place}"

        with instrumented(subject), tracing.running(rollout := context(subject)):
            asyncio.run(subject.with_equal_calls(provider.url, "solver", ASK, add))
        tools = of(rollout, semconv.EXECUTE_TOOL)
        recorded = {s.attributes[semconv.TOOL_CALL_ID]: s.attributes[semconv.TOOL_CALL_RESULT] for s in tools}
        assert recorded == results_by_id(provider.last.body)
        assert sorted(recorded.values()) == ["result 0", "result 1"]

    @capability("a tool that its framework ends for taking too long is an error", needs="limits_tools")
    @pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
    def test_a_tool_that_takes_too_long_is_an_error(self, subject: Subject, content: bool, provider: Provider) -> None:
        async def add(a: int, b: int) -> int:
            """Add two numbers."""
            return await asyncio.get_running_loop().create_future()

        rollout = context(subject)
        rollout.capture_content = content
        with instrumented(subject), tracing.running(rollout):
            assert "sum " in asyncio.run(subject.with_time_limit(provider.url, "solver", ASK, add))
        [tool] = of(rollout, semconv.EXECUTE_TOOL)
        assert (tool.name, tool.status) == ("execute_tool add", "error")
        [told] = results_by_id(provider.last.body).values()
        assert "timed out" in told.lower()
        assert ("timed out" in str(tool.status_message).lower()) == content

    @capability("a failed model call is recorded and raised unchanged", gap="call_errors")
    def test_a_failed_call_is_recorded_and_raised_unchanged(
        self, subject: Subject, way: str, gateway: Provider
    ) -> None:
        gateway.script = lambda body: Reply(status=400)
        agent = subject.agent(gateway.url, "solver")
        raised = raised_in(rollout := context(subject, gateway), subject, agent, way)
        told = of(rollout, semconv.CHAT)
        assert [(s.status, [e.name for e in s.events]) for s in told] == [("error", ["exception"])] * len(told)
        types = {s.attributes[semconv.ERROR_TYPE] for s in told}
        if "call_errors" in subject.gaps:
            assert told
            assert types <= {type(raised).__qualname__, subject.bad_request().__qualname__}
        else:
            assert isinstance(raised, subject.bad_request())
            assert "scripted 400" in str(raised)
            assert (len(told), types) == (1, {type(raised).__qualname__})

    @capability("an agent that is not selected keeps its provider, key and model, and is traced")
    def test_an_unselected_agent_keeps_its_provider_and_is_traced(
        self, subject: Subject, provider: Provider, gateway: Provider
    ) -> None:
        agent = subject.agent(provider.url, "solver")
        with instrumented(subject), tracing.running(rollout := context(subject, gateway, agents="nobody")):
            assert do(subject, agent) == "sum 5"
        assert gateway.seen == []
        headers = ("x-api-key", "x-goog-api-key", "authorization")
        keys = {s.headers[name].removeprefix("Bearer ") for s in provider.seen for name in headers if name in s.headers}
        assert keys == {KEY}
        assert not [s for s in provider.seen if "agl" in s.text or "traceparent" in s.headers]
        chat = of(rollout, semconv.CHAT)[-1]
        assert semconv.ROUTED not in chat.attributes
        assert any(
            "sum 5" in part for m in read.said(chat) for part in (m.text, *(c.json_arguments for c in m.tool_calls))
        )
        assert (chat.attributes[semconv.INPUT_TOKENS], chat.attributes[semconv.OUTPUT_TOKENS]) == (7, 3)
        assert str(chat.attributes[semconv.URL]).startswith(provider.root)

    @capability("a request's sampling options, its cached and its reasoning tokens are recorded", by_way=True)
    def test_a_call_records_how_it_was_requested_and_what_it_used(
        self, subject: Subject, way: str, provider: Provider
    ) -> None:
        script = subject.script()
        provider.script = lambda body: dataclasses.replace(script(body), cached=4, thought=2)
        with instrumented(subject), tracing.running(rollout := context(subject)):
            do(subject, subject.agent(provider.url, "solver"), way=way)
        for chat, seen in zip(of(rollout, semconv.CHAT), provider.seen, strict=True):
            streams = bool(seen.body.get("stream")) or ":streamGenerateContent" in seen.path
            assert bool(chat.attributes.get(semconv.REQUEST_STREAM)) == streams
            assert (chat.attributes.get(semconv.TIME_TO_FIRST_CHUNK, -1) >= 0) == (streams and "body" not in way)
            for name in ("temperature", "top_p", "max_tokens"):
                assert chat.attributes.get(f"gen_ai.request.{name}") == seen.body.get(name)
            used = [chat.attributes.get(name) for name in _USAGE]
            # Chat Completions streams its usage only on request.
            assert used == [7, 3, 4, 2] or (streams and subject.sdk == "openai" and used == [None] * 4)

    @capability("its system prompt is replaced in the request, and no other byte", needs="takes_prompt", by_way=True)
    def test_a_system_prompt_is_replaced_and_not_another_byte(self, subject: Subject, way: str) -> None:
        subject = copy.copy(subject)
        subject.prompt = 'Add "numbers".\nBe brief.'
        better = "Use the tool."
        sent: list[list[Seen]] = []
        for texts in (None, {"solver": {subject.prompt: ("better", better)}}):
            # Each time at another address, for LangChain keeps an address's connections longer than their event loop
            # lives.
            with (
                serve(subject.script()) as provider,
                instrumented(subject),
                tracing.running(rollout := context(subject)),
            ):
                rollout.system_prompts = texts
                rollout.prompts = True
                assert do(subject, subject.agent(provider.url, "solver"), way=way) == "sum 5"
            sent.append(provider.seen)
        own, replaced = sent
        text = json.dumps(subject.prompt).encode()
        new = json.dumps(better).encode()
        n = len(subject.finish_reasons)
        assert [s.raw.count(text) for s in own] == [1] * n
        assert [s.raw for s in replaced] == [s.raw.replace(text, new) for s in own]
        assert [s.path for s in replaced] == [s.path for s in own]
        assert [*map(kept_headers, replaced)] == [*map(kept_headers, own)]
        chats = of(rollout, semconv.CHAT)
        assert [[*s.attributes[semconv.SYSTEM_PROMPTS]] for s in chats] == [["better"]] * n
        assert all(better in [m.text for m in read.sent(s)] for s in chats)

    @capability("its messages are read back whole", by_way=True)
    def test_its_messages_are_read_back_whole(self, subject: Subject, way: str, provider: Provider) -> None:
        agent = subject.agent(provider.url, "solver")
        with instrumented(subject), tracing.running(rollout := context(subject)):
            rollout.prompts = True
            do(subject, agent, way=way)
        chats = of(rollout, semconv.CHAT)
        for chat, seen, reply in zip(chats, provider.seen, provider.replies, strict=True):
            check_form(subject, chat)
            [answer] = read.said(chat)
            # A stream of the scripted provider ends each word with a space.
            assert (answer.role, answer.text.rstrip()) == ("assistant", reply.content or "")
            assert [(c.name, json.loads(c.json_arguments)) for c in answer.tool_calls] == [*reply.tools]
            assert all(isinstance(p, Text | ToolCall) for p in answer.parts)
            sent = read.sent(chat)
            who, said = last_said(seen.body)
            last = sent[-1]
            assert [said] == ([r.text for r in last.tool_results] if who == "tool" else [last.text])
            if who == "tool" and len(sent) > 1:
                assert {r.id for r in last.tool_results} <= {c.id for message in sent for c in message.tool_calls}
            assert not [p for message in sent for p in message.parts if isinstance(p, Other)]
        assert ASK in read.sent(chats[0])[-1].text

    @capability("a model's reasoning is recorded apart from its answer", gap="reasoning", by_way=True)
    def test_reasoning_is_recorded_apart_from_the_answer(self, subject: Subject, way: str, provider: Provider) -> None:
        if "reasoning" in subject.gaps:
            pytest.skip(f"{subject.name} drops a model's reasoning")
        script = provider.script
        provider.script = lambda body: dataclasses.replace(script(body), reasoning="two and three")
        agent = subject.agent(provider.url, "solver")
        with instrumented(subject), tracing.running(rollout := context(subject)):
            rollout.prompts = True
            do(subject, agent, way=way)
        answers = [answer for chat in of(rollout, semconv.CHAT) for answer in read.said(chat)]
        assert [(a.reasoning, a.text.rstrip()) for a in answers] == [
            ("two and three", reply.content or "") for reply in provider.replies
        ]

    @capability("an image in a request is recorded as it came", needs="image_question")
    def test_an_image_is_recorded_as_it_came(self, subject: Subject, way: str, provider: Provider) -> None:
        agent = subject.agent(provider.url, "solver")
        with instrumented(subject), tracing.running(rollout := context(subject)):
            rollout.prompts = True
            do(subject, agent, subject.image_question, way=way)
        for chat, seen in zip(of(rollout, semconv.CHAT), provider.seen, strict=True):
            check_form(subject, chat)
            [asked] = [m for m in read.sent(chat) if any(isinstance(p, Other) for p in m.parts)]
            said = next(m for m in seen.body.get("messages") or seen.body["input"] if m["role"] == "user")
            kept = [part for part in said["content"] if "text" not in part]
            assert kept
            assert [p.value for p in asked.parts if isinstance(p, Other)] == kept
            assert asked.text == ASK

    @capability("twenty rollouts in threads never mix")
    def test_twenty_rollouts_in_threads_never_mix(
        self, subject: Subject, provider: Provider, gateway: Provider
    ) -> None:
        agent = subject.agent(provider.url, "solver")
        rollouts = [context(subject, gateway, id=f"ro-{i:02}") for i in range(20)]
        barrier = threading.Barrier(len(rollouts))

        def run(rollout: RolloutContext) -> None:
            barrier.wait(10)
            with tracing.running(rollout):
                do(subject, agent, rollout.rollout_id)

        with instrumented(subject):
            threads = [threading.Thread(target=run, args=(r,)) for r in rollouts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for rollout in rollouts:
            check_alone(subject, rollout, gateway)

    @capability("twenty rollouts in asyncio tasks never mix", needs="async_ways")
    def test_twenty_rollouts_in_tasks_never_mix(self, subject: Subject, provider: Provider, gateway: Provider) -> None:
        agent = subject.agent(provider.url, "solver")
        rollouts = [context(subject, gateway, id=f"ro-{i:02}") for i in range(20)]

        async def run(rollout: RolloutContext) -> None:
            with tracing.running(rollout):
                await getattr(agent, subject.async_ways[0])(rollout.rollout_id)

        async def main() -> None:
            await asyncio.gather(*(run(r) for r in rollouts))

        with instrumented(subject):
            asyncio.run(main())
        for rollout in rollouts:
            check_alone(subject, rollout, gateway)

    @capability("switched off, it changes nothing")
    def test_not_instrumented_is_without_effect(self, subject: Subject, provider: Provider, gateway: Provider) -> None:
        before = subject.changed()
        agent = subject.agent(provider.url, "solver")
        with tracing.running(rollout := context(subject, gateway)):
            assert do(subject, agent) == "sum 5"
        assert gateway.seen == []
        assert [s.operation for s in rollout.spans] == [semconv.INVOKE_AGENT]
        assert subject.changed() == before

    @capability("outside a rollout, the agent runs unchanged")
    def test_outside_a_rollout_an_instrumented_agent_runs_as_ever(self, subject: Subject, provider: Provider) -> None:
        agent = subject.agent(provider.url, "solver")
        firsts = [*subject.ways[:1], *subject.async_ways[:1]]
        with instrumented(subject):
            for way in firsts:
                assert do(subject, agent, way=way) == "sum 5"
        assert len(provider.seen) == len(subject.finish_reasons) * len(firsts)
        assert not [s for s in provider.seen if "agl" in s.text or "traceparent" in s.headers]

    @capability("the user's own tracing is unchanged")
    def test_a_user_who_traces_sees_their_own_spans_alone(self, subject: Subject, provider: Provider) -> None:
        exporter = InMemorySpanExporter()
        users = TracerProvider()
        users.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = users.get_tracer("users")
        agent = subject.agent(provider.url, "solver")
        with instrumented(subject), tracer.start_as_current_span("around") as around:
            with tracing.running(rollout := context(subject)):
                do(subject, agent)
            assert trace.get_current_span() is around
            with tracer.start_as_current_span("after"):
                pass
        after, outermost = exporter.get_finished_spans()
        assert (after.name, outermost.name) == ("after", "around")
        assert after.parent is not None
        assert after.parent.span_id == around.get_span_context().span_id
        assert len(of(rollout, semconv.CHAT)) == len(provider.seen)

    @capability("the user's own spans keep their parents")
    def test_users_spans_have_the_parents_that_they_have_without_agl(
        self, subject: Subject, way: str, provider: Provider, gateway: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        exporter = InMemorySpanExporter()
        users = TracerProvider()
        users.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = users.get_tracer("users")
        monkeypatch.setattr(f"{add.__module__}.users_span", lambda: tracer.start_as_current_span("in the tool"))
        trees = []
        # Each at a server of its own: some frameworks keep a client for an address, which is of one event loop.
        for traced, server in ((False, provider), (True, gateway)):
            agent = subject.agent(server.url, "solver")
            with contextlib.ExitStack() as on:
                if traced:
                    on.enter_context(instrumented(subject))
                    on.enter_context(tracing.running(context(subject)))
                with tracer.start_as_current_span("around"):
                    do(subject, agent, way=way)
            spans = exporter.get_finished_spans()
            exporter.clear()
            names = {s.context.span_id: s.name for s in spans if s.context is not None}
            trees.append([(s.name, s.parent and names.get(s.parent.span_id, "a stranger's")) for s in spans])
        assert trees[0] == trees[1]
        assert trees[0][-1] == ("around", None)

    @capability("switching it on twice equals once; switching it off restores everything")
    def test_twice_is_once_and_uninstrument_restores(self, subject: Subject, provider: Provider) -> None:
        # Under the SDK's own tracer, where that makes the spans of model calls.
        with contextlib.nullcontext() if subject.traces_models else plugins.switched_on(()):
            before = subject.changed()
            first = subject.tracer()
            second = subject.tracer()
            first.instrument()
            second.instrument()
            agent = subject.agent(provider.url, "solver")
            with tracing.running(rollout := context(subject)):
                do(subject, agent)
            assert len(of(rollout, semconv.CHAT)) == len(provider.seen)
            assert len(rollout.spans) == spans_of_one_run(subject)
            assert first.instrumented
            second.uninstrument()
            assert subject.changed() == before
            assert not first.instrumented
            first.uninstrument()
            assert subject.changed() == before

    @capability("with all other adapters on, each span is made once")
    def test_all_adapters_together_do_not_double_spans(self, subject: Subject, provider: Provider) -> None:
        agent = subject.agent(provider.url, "solver")
        with contextlib.ExitStack() as on:
            for adapter in (*plugins.adapters().values(), subject.tracer):
                with contextlib.suppress(ImportError):  # of a framework that is not installed
                    on.callback(adapter().instrument().uninstrument)
            with tracing.running(rollout := context(subject)):
                do(subject, agent)
        assert len(of(rollout, semconv.CHAT)) == len(provider.seen)
        assert len(rollout.spans) == spans_of_one_run(subject)

    @capability("importing it imports no framework")
    def test_importing_the_adapter_imports_no_framework(self, subject: Subject) -> None:
        module = subject.tracer.__module__
        code = f"import sys, {module}; print([m for m in {subject.frameworks} if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "[]", done.stderr

    @capability("`agl.wrap` finds it by type")
    def test_wrap_finds_the_framework_by_type(self, subject: Subject, provider: Provider) -> None:
        agent = agl.wrap(subject.wrappable(provider.url, "solver"), reward=lambda task, output: len(output))
        assert agent.name == "solver" or not subject.names_agents
        assert subject.tracer in [type(t) for t in agent.tracers]
        assert plugins.adapters()[subject.adapter or subject.name] is subject.tracer

        async def run() -> Outcome:
            done: Any = agent.run({"question": ASK}, {}, RolloutInfo("ro", 1))
            return await done if agent.is_async else done

        assert asyncio.run(run()) == Outcome(5, "sum 5")

    @capability("captured text can be switched off")
    def test_captured_text_can_be_switched_off(self, subject: Subject, provider: Provider) -> None:
        agent = subject.agent(provider.url, "solver")
        rollout = context(subject)
        rollout.capture_content = False
        with instrumented(subject), tracing.running(rollout):
            do(subject, agent)
        assert "sum 5" not in json.dumps([dict(s.attributes) for s in rollout.spans], default=str)
        if "response_facts" not in subject.gaps:
            assert of(rollout, semconv.CHAT)[0].attributes[semconv.RESPONSE_ID]

    @capability("captured text can be switched off: of an error the type alone is recorded")
    @pytest.mark.parametrize("what", ["a tool raises", "a tool reports", "the provider refuses", "a stream breaks off"])
    def test_of_an_error_without_content_the_type_alone_is_recorded(
        self, subject: Subject, what: str, provider: Provider
    ) -> None:
        refusal, streams = "you asked: patient 7", [way for way in ways(subject) if "stream" in way]
        if what == "a tool reports" and ("tool_reports" in subject.gaps or not subject.traces_tools):
            pytest.skip(f"{subject.name}'s tools can but raise")
        if not streams and what == "a stream breaks off":
            pytest.skip(f"{subject.name} does not stream")
        agent = (subject.reporting if what == "a tool reports" else subject.agent)(provider.url, "solver")
        way = (streams if what == "a stream breaks off" else ways(subject))[0]
        provider.script = {
            "the provider refuses": lambda body: Reply(refusal, status=400),
            "a stream breaks off": lambda body: Reply("patient 7", fails=True),
        }.get(what, subject.script(a=-1))
        rollout = context(subject)
        rollout.capture_content = False
        rollout.prompts = True
        raised = raised_in(rollout, subject, agent, way)
        recorded = json.dumps([dataclasses.asdict(s) for s in rollout.spans], default=str)
        texts = ("a is negative", NO_NUMBERS, "scripted failure", "patient 7", ASK)
        assert [text for text in texts if text in recorded] == []
        failed = [s for s in rollout.spans if s.status == "error"]
        assert failed or raised is None
        assert [s.status_message for s in failed] == [s.attributes.get(semconv.ERROR_TYPE) for s in failed]

    @capability(
        "captured text can be switched off: a tool's name that the model made up is not recorded", needs="traces_tools"
    )
    @pytest.mark.parametrize("what", ["a tool that does not exist", "arguments that do not fit"])
    def test_nothing_that_a_model_made_up_is_recorded_without_content(
        self, subject: Subject, what: str, provider: Provider
    ) -> None:
        script = subject.script()
        asked = itertools.count()
        arguments = {"a": "patient_7", "b": {"patient_7": 1}}
        made_up = instead_of_add(script, "add" if "arguments" in what else "find_patient_7", arguments)
        # Some frameworks let the model try again for ever.
        provider.script = lambda body: made_up(body) if next(asked) < 4 else Reply("patient_7")
        rollout = context(subject)
        rollout.capture_content = False
        raised_in(rollout, subject, subject.agent(provider.url, "solver"), ways(subject)[0])
        assert "patient_7" not in json.dumps([dataclasses.asdict(s) for s in rollout.spans], default=str)
        assert {s.attributes[semconv.TOOL_NAME] for s in of(rollout, semconv.EXECUTE_TOOL)} <= {"add", "unknown"}


def check_no_tool_succeeded(rollout: RolloutContext) -> None:
    """That no rule for successful tools is called, neither for spans nor for what is inferred from the requests."""
    outcomes = tool_outcomes(SpanIndex((), completed(rollout.spans)))
    assert [(o.tool, o.output) for o in outcomes if o.error is None] == []


def raised_in(rollout: RolloutContext, subject: Subject, agent: Any, way: str) -> Exception | None:
    """The exception with which the agent's run leaves the rollout. Its messages are recorded."""
    rollout.prompts = True
    try:
        with instrumented(subject), tracing.running(rollout):
            do(subject, agent, way=way)
    except Exception as error:
        return error
    return None


def check_form(subject: Subject, chat: Span) -> None:
    """That a span's messages are in OpenTelemetry's form."""
    for name in (semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES):
        for message in json.loads(chat.attributes[name]):
            assert isinstance(message["role"], str)
            assert all(isinstance(part["type"], str) for part in message["parts"])
    if "response_facts" not in subject.gaps:
        assert all(m["finish_reason"] for m in json.loads(chat.attributes[semconv.OUTPUT_MESSAGES]))


def kept_headers(seen: Seen) -> dict[str, str]:
    return {k: v for k, v in seen.headers.items() if k not in ("content-length", "host")}


def spans_of_one_run(subject: Subject) -> int:
    """The rollout's own span, the agent's if it has a name, one for each call, and the tool's."""
    return 1 + subject.names_agents + len(subject.finish_reasons) + subject.traces_tools


def asks_twice(subject: Subject) -> Script:
    """The subject's policy, which asks for its tool twice in one answer."""
    script = subject.script()

    def twice(body: dict[str, Any]) -> Reply:
        reply = script(body)
        return dataclasses.replace(reply, tools=reply.tools * 2)

    return twice


def results_by_id(body: dict[str, Any]) -> dict[str, str]:
    """The tools' results in a request of any dialect, by the id of their call."""
    return {r.id: r.text for message in read.body(body) for r in message.tool_results}


def check_call_id(subject: Subject, tool: Span, provider: Provider) -> None:
    if "call_ids" not in subject.gaps:
        assert tool.attributes[semconv.TOOL_CALL_ID] == subject.call_id(provider.last.body)


def instead_of_add(script: Script, name: str, arguments: dict[str, Any]) -> Script:
    """A policy that asks for this wherever `script` asks for `add`."""

    def asks(body: dict[str, Any]) -> Reply:
        reply = script(body)
        tools = tuple((name, arguments) if tool == "add" else (tool, own) for tool, own in reply.tools)
        return dataclasses.replace(reply, tools=tools)

    return asks


def check_refused(tools: Sequence[Span], name: str, arguments: dict[str, Any]) -> None:
    for tool in tools:
        assert (tool.name, tool.status) == (f"execute_tool {name}", "error")
        assert json.loads(tool.attributes[semconv.TOOL_CALL_ARGUMENTS]) == arguments


def check_alone(subject: Subject, rollout: RolloutContext, gateway: Provider) -> None:
    """That a rollout has its own spans, whole, and nothing of anybody else's."""
    mine = [s for s in gateway.seen if f"/rollouts/{rollout.rollout_id}/" in s.path]
    assert len(mine) == len(subject.finish_reasons)
    # A request that names the response it continues does not repeat the question.
    assert all(rollout.rollout_id in json.dumps(s.body) or "previous_response_id" in s.body for s in mine)
    assert {s.traceparent_span for s in mine} == {s.span_id for s in of(rollout, semconv.CHAT)}
    assert {s.rollout_id for s in rollout.spans} == {rollout.rollout_id}
    assert len({s.trace_id for s in rollout.spans}) == 1
    assert len(rollout.spans) == spans_of_one_run(subject)
    known = {s.span_id for s in rollout.spans}
    assert [s.parent_id for s in rollout.spans if s.parent_id not in known] == [None]
