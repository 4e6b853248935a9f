"""Bare anthropic clients under the conformance suite: the loop with the tool `add`, over Messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, ClassVar

from subject_openai import PARAMETERS
from subjects import Loop

from agl.adapters.anthropic import AnthropicTracer
from agl.testing.subject import KEY, Subject, add


class MessagesLoop(Loop):
    final = "get_final_message"

    def __init__(self, url: str) -> None:
        import anthropic

        settings: Any = {"base_url": url.removesuffix("/v1"), "api_key": KEY, "max_retries": 0}
        self.client, self.async_client = anthropic.Anthropic(**settings), anthropic.AsyncAnthropic(**settings)

    def resource(self, *, is_async: bool) -> Any:
        return (self.async_client if is_async else self.client).messages

    def request(self, history: list[Any]) -> dict[str, Any]:
        tool = {"name": "add", "input_schema": PARAMETERS}
        cached = {"type": "text", "text": self.prompt, "cache_control": {"type": "ephemeral"}}
        system = {} if self.prompt is None else {"system": [cached]}
        return {"model": "m", "max_tokens": 99, **system, "messages": history, "tools": [tool]}

    def collect(self, events: Iterable[Any]) -> Any:
        from anthropic.types import Message

        message: dict[str, Any] = {}
        arguments = ""
        for event in events:
            match event.type:
                case "message_start":
                    message = event.message.model_dump()
                case "content_block_start":
                    message["content"].append(event.content_block.model_dump())
                    arguments = ""
                case "content_block_delta" if event.delta.type == "text_delta":
                    message["content"][-1]["text"] += event.delta.text
                case "content_block_delta" if event.delta.type == "thinking_delta":
                    message["content"][-1]["thinking"] += event.delta.thinking
                case "content_block_delta":
                    arguments += event.delta.partial_json
                    message["content"][-1]["input"] = json.loads(arguments)
        return Message.model_validate(message)

    def step(self, history: list[Any], answer: Any) -> str | None:
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return answer.content[-1].text
        history.append({"role": "assistant", "content": [c.model_dump(include=USED) for c in calls]})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))} for call in calls]
        history.append({"role": "user", "content": results})
        return None


USED = {"type", "id", "name", "input"}
"""What the API takes back of a `tool_use` block."""


class BareAnthropic(Subject):
    name = "anthropic"
    tracer = AnthropicTracer
    requires = ("anthropic",)
    frameworks = ("anthropic", "openai")
    names_agents = False
    traces_tools = False
    sdk = "anthropic"
    response_id = "msg_"
    finish_reasons = ("tool_use", "end_turn")
    takes_prompt = True
    image_question: ClassVar[Any] = [
        {"type": "text", "text": "what is 2+3?"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    ]
    ways = Loop.ways
    async_ways = Loop.async_ways
    sync_reads = Loop.sync_reads
    async_reads = Loop.async_reads

    def agent(self, url: str, name: str) -> Any:
        loop = MessagesLoop(url)
        loop.prompt = self.prompt
        return loop

    def wrappable(self, url: str, name: str) -> Any:
        return self.agent(url, name).function(name)
