"""The stream of an OpenAI response: its events, in OpenAI's order.

Source: OpenAI API reference, "Streaming events" of Responses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl.trainer.gateway import http
from agl.trainer.gateway.calls import Choice, Reply, ServedPolicy
from agl.trainer.gateway.dialects import chat
from agl.trainer.gateway.dialects.responses_answer import (
    Status,
    finished,
    message_item,
    reasoning_item,
    response,
    text_part,
)
from agl.trainer.gateway.dialects.responses_body import Asked
from agl.trainer.gateway.dialects.responses_items import History
from agl.trainer.gateway.errors import RequestError


class Streamer:
    """Turns tokens, as they come, into events.

    Invariant: the deltas of an item add up to the item in `response.output_item.done`, and those items, in order, are
    the output of the response that ends the stream. What can be told when is decided by the chat dialect's streamer.
    """

    def __init__(self, response_id: str, asked: Asked, history: History, served: ServedPolicy) -> None:
        self._id, self._asked, self._history, self._served = response_id, asked, history, served
        self._created = time.time()
        body = chat.ChatBody.model_construct()
        self._chat = chat.Streamer(response_id, served.name, body, asked.chat, served.rendering)
        self._number = -1
        self._reasoned = self._speaking = False

    def push(self, choice: Choice) -> Iterator[bytes]:
        """For what was sampled since the last call."""
        yield from self._begin()
        for chunk in self._chat.push(choice):
            yield from self._said(chunk["choices"][0]["delta"])

    def finish(self, replies: Sequence[Reply]) -> Iterator[bytes]:
        """For the end of the answer."""
        (reply,) = replies
        yield from self._begin()
        for chunk in self._chat.finish(replies):
            yield from self._said(chunk["choices"][0]["delta"])
        end = finished(self._id, self._served, self._asked, self._history, reply, created=self._created)
        for index, item in enumerate(end["output"]):
            if item["type"] == "message":
                yield from self._end_message(index, item)
            elif item["type"] == "function_call":
                yield from self._call(index, item)
        yield self._event(f"response.{end['status']}", response=end)

    def fail(self, error: RequestError) -> Iterator[bytes]:
        """For an answer that broke off."""
        yield from self._begin()
        why = {"code": error.code or "server_error", "message": error.message}
        yield self._event("response.failed", response=self._response("failed", error=why))

    def _begin(self) -> Iterator[bytes]:
        if self._number < 0:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))

    def _said(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        """What a chat delta adds to reasoning and text."""
        if thought := delta.get("reasoning_content"):
            yield from self._reasoning(thought)
        if text := delta.get("content"):
            yield from self._begin_message()
            yield self._in_message("response.output_text.delta", delta=text, logprobs=[])

    def _reasoning(self, thought: str) -> Iterator[bytes]:
        self._reasoned = True
        item = reasoning_item(self._id, thought)
        part = item["content"][0]
        at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        yield self._event("response.output_item.added", output_index=0, item={**item, "content": []})
        yield self._event("response.content_part.added", **at, part={**part, "text": ""})
        yield self._event("response.reasoning_text.delta", **at, delta=thought)
        yield self._event("response.reasoning_text.done", **at, text=thought)
        yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _begin_message(self) -> Iterator[bytes]:
        if not self._speaking:
            self._speaking = True
            item = message_item(self._id, None, "in_progress")
            yield self._event("response.output_item.added", output_index=int(self._reasoned), item=item)
            yield self._in_message("response.content_part.added", part=text_part(""))

    def _end_message(self, index: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._begin_message()
        (part,) = item["content"]
        yield self._in_message("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._in_message("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _in_message(self, event: str, **fields: Any) -> bytes:
        item_id = message_item(self._id, None, "in_progress")["id"]
        return self._event(event, item_id=item_id, output_index=int(self._reasoned), content_index=0, **fields)

    def _call(self, index: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        at, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **at, delta=arguments)
        yield self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _response(self, status: Status, **fields: Any) -> dict[str, Any]:
        return response(self._id, self._served.name, self._asked.body, status, self._created, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return http.sse({"type": kind, "sequence_number": self._number, **fields}, event=kind)
