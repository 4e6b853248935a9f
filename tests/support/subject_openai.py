"""Bare openai clients under the conformance suite: a loop with the tool `add`, by Chat Completions and by Responses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from subjects import Loop

from agl.adapters.openai import OpenAITracer
from agl.testing.subject import KEY, Subject, add

try:
    OPENAI = version("openai")
except PackageNotFoundError:
    OPENAI = ""
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class ChatLoop(Loop):
    final = "get_final_completion"

    def __init__(self, url: str) -> None:
        self.client, self.async_client = clients(url)

    def resource(self, *, is_async: bool) -> Any:
        return (self.async_client if is_async else self.client).chat.completions

    def helper(self, *, is_async: bool) -> Any:
        # openai < 1.92 has it among its beta features.
        resource = self.resource(is_async=is_async)
        beta = (self.async_client if is_async else self.client).beta
        return resource.stream if hasattr(resource, "stream") else beta.chat.completions.stream

    def request(self, history: list[Any]) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}
        system = [] if self.prompt is None else [{"role": "system", "content": self.prompt}]
        return {"model": "m", "messages": [*system, *history], "tools": [tool]}

    def collect(self, events: Iterable[Any]) -> Any:
        from openai.lib.streaming.chat import ChatCompletionStreamState

        state = ChatCompletionStreamState()
        for chunk in events:
            state.handle_chunk(chunk)
        return state.get_final_completion()

    def step(self, history: list[Any], answer: Any) -> str | None:
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        history.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        return None


class ResponsesLoop(Loop):
    final = "get_final_response"

    def __init__(self, url: str) -> None:
        self.client, self.async_client = clients(url)

    def resource(self, *, is_async: bool) -> Any:
        return (self.async_client if is_async else self.client).responses

    def request(self, history: list[Any]) -> dict[str, Any]:
        tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
        instructions = {} if self.prompt is None else {"instructions": self.prompt}
        return {"model": "m", **instructions, "input": history, "tools": [tool]}

    def collect(self, events: Iterable[Any]) -> Any:
        return [*events][-1].response

    def step(self, history: list[Any], answer: Any) -> str | None:
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            result = add(**json.loads(call.arguments))
            said = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
            history += [said, {"type": "function_call_output", "call_id": call.call_id, "output": str(result)}]
        return None


def clients(url: str) -> tuple[Any, Any]:
    """A sync and an async client of the provider at `url`."""
    import openai

    settings: Any = {"base_url": url, "api_key": KEY, "max_retries": 0}
    return openai.OpenAI(**settings), openai.AsyncOpenAI(**settings)


class BareOpenAI(Subject):
    name = "openai"
    tracer = OpenAITracer
    requires = ("openai",)
    frameworks = ("openai",)
    names_agents = False
    traces_tools = False
    ways = Loop.ways
    async_ways = Loop.async_ways
    sync_reads = Loop.sync_reads
    async_reads = Loop.async_reads
    takes_prompt = True
    image_question: ClassVar[Any] = [
        {"type": "text", "text": "what is 2+3?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    loop: ClassVar[type[ChatLoop] | type[ResponsesLoop]] = ChatLoop

    def agent(self, url: str, name: str) -> Any:
        loop = self.loop(url)
        loop.prompt = self.prompt
        return loop

    def wrappable(self, url: str, name: str) -> Any:
        return self.agent(url, name).function(name)


class BareOpenAIResponses(BareOpenAI):
    name = "openai_responses"
    adapter = "openai"
    response_id = "resp_"
    # openai 1.66 does not know reasoning's summaries, and its own stream() then fails.
    gaps: ClassVar[frozenset[str]] = frozenset({"reasoning"} if OPENAI.startswith("1.66.") else ())
    image_question: ClassVar[Any] = [
        {"type": "input_text", "text": "what is 2+3?"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
    ]
    loop = ResponsesLoop
