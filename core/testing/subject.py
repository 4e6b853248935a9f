"""A framework's agent as the conformance suite sees it: with a tool `add`, run in every way that the framework has."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

from agl.adapters.base import InstrumentedTracer
from agl.testing.provider import Reply, Script, last_said, last_tool_call_id
from agl.tracing.sdk_hooks import client_classes

KEY = "sk-provider"
"""The key of the agent's own provider."""

NO_NUMBERS = "no numbers today"


class ToolFailed(Exception):
    """What the tool raises when asked for a negative number."""


GAPS = {
    "response_facts": (
        "The framework's hooks do not get the response's finish reason or id. Training does not need them: the gateway "
        "records both."
    ),
    "call_ids": ("The framework's hooks do not get the id of the model's tool call, so the tool's span has none."),
    "tool_errors": (
        "The framework returns a tool's exception to the model, or wraps it in another one. Either way, the tool's "
        "span is an error."
    ),
    "error_texts": "The framework's hooks get a tool's exception as text, so the tool's span has no type.",
    "tool_reports": "In this framework a tool can mark its result as a failure only by raising.",
    "mcp": "MCP tools need a package that is not installed.",
    "reasoning": "The framework's hooks do not get the model's reasoning.",
    "call_errors": "The framework wraps the SDK's exception in another one; the span has the one that was raised.",
}
"""What a framework itself does otherwise, in words for the capability matrix (docs/adapters.md)."""


Decision = Literal["approved", "rejected", "unanswered"]
"""What a person says to a tool that waits for an approval."""

users_span: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
"""Opens a span of the user's own in the tool."""


result: Callable[[], Any] | None = None
"""What the tool returns, or raises, instead of the sum."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    with users_span():
        pass
    if result is not None:
        return result()
    if a < 0:
        raise ToolFailed("a is negative")
    return a + b


def tool_result(body: dict[str, Any]) -> str | None:
    """The tool's result that a request of any dialect ends with; None if it ends with something else."""
    who, text = last_said(body)
    return text if who == "tool" else None


def uses_add(
    a: int = 2,
    b: int = 3,
    *,
    result: Callable[[dict[str, Any]], str | None] = tool_result,
    call: str | None = None,
    answer: Callable[[str], Reply] = Reply,
) -> Script:
    """A policy that calls `add` once, where it has tools, and then repeats the result.

    Args:
        result: a request's body -> the tool's result that it ends with, None if there is none yet. For frameworks that
            give results to the model as a user's messages.
        call: the text with which the model calls `add`, for frameworks that read calls out of texts; None = a tool
            call of the API.
        answer: the final text -> the reply, for frameworks that end with a special tool.
    """

    def script(body: dict[str, Any]) -> Reply:
        if (text := result(body)) is not None:
            return answer(f"sum {text}")
        if call is not None:
            return Reply(call)
        if body.get("tools"):
            return Reply(None, (("add", {"a": a, "b": b}),))
        return answer(f"you said {last_said(body)[1]}")

    return script


class Subject:
    """A framework's agent with the tool `add`.

    Attributes:
        name: in ids of tests, and the heading of its column in the matrix.
        adapter: the name of the adapter's entry point; `name` if empty.
        tracer: the adapter.
        requires: modules without which the subject is left out of agl's own runs.
        frameworks: modules that importing the adapter must not import.
        names_agents: whether the framework tells an agent's name; otherwise the rollout's is used.
        prompt: the system prompt of the agents that `agent` makes; None = none, or one of the framework's. The suite
            sets it.
        takes_prompt: whether `agent` heeds `prompt`.
        image_question: a question with an image, in the framework's form; None if the suite knows none.
        traces_models: whether the adapter opens a span for a model call; otherwise the SDK's tracer does, which the
            trainer switches on as well.
        traces_tools: whether the adapter opens a span for a tool's run.
        approvals: whether a tool can wait for a person's approval in the framework (`with_approval`).
        parallel_calls: whether the framework runs all tool calls of one answer (`with_equal_calls`).
        limits_tools: whether a tool can have a time limit in the framework (`with_time_limit`).
        sdk: whose client makes the calls, which is also their `gen_ai.provider.name`.
        response_id: how the provider's ids of responses begin.
        finish_reasons: of each call that answering takes: by default one that asks for the tool, and one that answers.
        ways: how an agent can be run, by method name (`invoke`, `stream`, `batch`, ...); each returns the final text.
            May be empty.
        async_ways: the same, awaited (`ainvoke`, `astream`, ...). May be empty.
        sync_reads: how an agent's answer can be read in pieces, by method name; each returns an iterator. May be
            empty.
        async_reads: the same with asynchronous iterators. May be empty.
        threads_async: whether asynchronous ways run in threads, where a call that is cancelled runs to its end.
        closes_reads: whether who stops reading early closes the asynchronous iterator in the same task, as frameworks
            ask whose streams are context managers; otherwise it is dropped.
        gaps: what the framework itself does otherwise (`GAPS`), tested in the adapter's own tests.
    """

    name: ClassVar[str]
    adapter: ClassVar[str] = ""
    tracer: ClassVar[type[InstrumentedTracer]]
    requires: ClassVar[tuple[str, ...]] = ()
    frameworks: ClassVar[tuple[str, ...]]
    names_agents: ClassVar[bool] = True
    prompt: str | None = None
    takes_prompt: ClassVar[bool] = False
    image_question: ClassVar[Any] = None
    traces_models: ClassVar[bool] = True
    traces_tools: ClassVar[bool] = True
    approvals: ClassVar[bool] = False
    parallel_calls: ClassVar[bool] = False
    limits_tools: ClassVar[bool] = False
    sdk: ClassVar[str] = "openai"
    response_id: ClassVar[str] = "chatcmpl-"
    finish_reasons: ClassVar[tuple[str, ...]] = ("tool_calls", "stop")
    ways: ClassVar[tuple[str, ...]] = ()
    async_ways: ClassVar[tuple[str, ...]] = ()
    sync_reads: ClassVar[tuple[str, ...]] = ()
    async_reads: ClassVar[tuple[str, ...]] = ()
    threads_async: ClassVar[bool] = False
    closes_reads: ClassVar[bool] = False
    gaps: ClassVar[frozenset[str]] = frozenset()

    @property
    def cancels(self) -> bool:
        """Whether a call can be cancelled."""
        return bool(self.async_ways) and not self.threads_async

    @property
    def reads(self) -> bool:
        """Whether an agent's answer can be read in pieces."""
        return bool(self.sync_reads or self.async_reads)

    def agent(self, url: str, name: str) -> Any:
        """An agent of that name with its model at `url`, which ends in /v1. It has the methods of `ways`."""
        raise NotImplementedError

    def wrappable(self, url: str, name: str) -> Any:
        """What a user hands to `agl.wrap`."""
        return self.agent(url, name)

    def reporting(self, url: str, name: str) -> Any:
        """The same agent with a tool `add` that, in its framework's way, says `NO_NUMBERS` instead of raising."""
        raise NotImplementedError

    async def with_mcp(self, url: str, name: str, question: str) -> str:
        """The answer of an agent with the tool `add` of `agl.testing.mcp_server`."""
        raise NotImplementedError

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        """The answer of an agent whose tool `add` waits for an approval, once that is decided; None without one."""
        raise NotImplementedError

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Callable[[int, int], Any]) -> str:
        """The answer of an agent with this async function as its tool `add`, asked so that calls may run at once."""
        raise NotImplementedError

    async def with_time_limit(self, url: str, name: str, question: str, tool: Callable[[int, int], Any]) -> str:
        """The answer of an agent with this async function as its tool `add`, which the framework soon ends."""
        raise NotImplementedError

    def script(self, a: int = 2, b: int = 3) -> Script:
        """A policy, in the framework's own protocol, that asks for `add(a, b)` and then says "sum " and the result."""
        return uses_add(a, b)

    def call_id(self, body: dict[str, Any]) -> str:
        """The id of the tool call that the result at the end of a request answers."""
        return last_tool_call_id(body)

    def changed(self) -> Any:
        """What instrumentation changes, to compare before and after."""
        return sdk_requests()

    def bad_request(self) -> type[Exception]:
        """What the SDK raises at status 400."""
        return importlib.import_module(self.sdk).BadRequestError


def sdk_requests() -> list[Any]:
    """The methods of each installed SDK's client classes that are patched, as the classes define them themselves."""
    return [vars(cls).get(method) for _, _, cls, method in client_classes()]
