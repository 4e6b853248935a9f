"""The stream of the Responses API: its events, in OpenAI's order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl.trainer.engines.base import Completion
from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import Choice, Reply, ServedPolicy
from agl.trainer.gateway.dialects.common import sse
from agl.trainer.gateway.dialects.deltas import Delta, MessageDeltas
from agl.trainer.gateway.dialects.error_forms import failure_code
from agl.trainer.gateway.dialects.responses.answer import (
    Status,
    finished_response,
    message_item,
    reasoning_item,
    response_object,
    store,
    text_part,
)
from agl.trainer.gateway.dialects.responses.body import ResponsesRequest
from agl.trainer.gateway.errors import RequestError


class ResponsesStream:
    """The events of one response.

    Invariant: the deltas of an item, with their log-probs, add up to the item in `response.output_item.done`, and those
    items, in order, are the output of the response that ends the stream; of one that fails, what was sent of them.
    """

    def __init__(self, pending: PendingRequest, served: ServedPolicy, request: ResponsesRequest) -> None:
        self._pending = pending
        self._served = served
        self._request = request
        self._id = pending.response_id
        self._created = time.time()
        self._deltas = MessageDeltas(request.chat, served.rendering)
        self._sequence_number = -1
        self._message_begun = False
        # What was sent of each.
        self._reasoning = ""
        self._text = ""
        self._reasoning_ended = False

    def push(self, choice: Choice) -> Iterator[bytes]:
        """Events for what was sampled since the last call."""
        yield from self._begin()
        for delta in self._deltas.push(choice):
            yield from self._events(delta, choice)

    def finish(self, replies: Sequence[Reply]) -> Iterator[bytes]:
        """Events that complete the response."""
        (reply,) = replies
        yield from self._begin()
        for delta in self._deltas.finish(0, reply):
            yield from self._events(delta, reply.completion)
        yield from self._end_reasoning()
        end = finished_response(self._pending, self._served, self._request, reply, created=self._created)
        for index, item in enumerate(end["output"]):
            if item["type"] == "message":
                yield from self._begin_message()
                (part,) = item["content"]
                # The token that ended the answer has no text, and so comes with no delta of one.
                if self._request.logprobs and (rest := self._deltas.logprobs(0, reply.completion, rest=True)):
                    yield self._in_message("response.output_text.delta", delta="", logprobs=rest)
                yield self._in_message("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
                yield self._in_message("response.content_part.done", part=part)
                yield self._event("response.output_item.done", output_index=index, item=item)
            elif item["type"] == "function_call":
                yield from self._function_call(index, item)
        yield self._event(f"response.{end['status']}", response=end)

    def fail(self, error: RequestError) -> Iterator[bytes]:
        """The error of an answer that broke off."""
        yield from self._begin()
        details = {"code": failure_code(error), "message": error.message}
        response = self._response("failed", error=details, output=self._sent_items())
        # A client may get it, but not continue it.
        store(self._pending, self._request, response, self._request.new)
        yield self._event("response.failed", response=response)

    def _sent_items(self) -> list[dict[str, Any]]:
        """What was sent of the output, as items."""
        items = [self._reasoning_item(self._reasoning)] if self._reasoning else []
        if self._message_begun:
            items.append(message_item(self._id, self._text, "incomplete"))
        return items

    def _begin(self) -> Iterator[bytes]:
        if self._sequence_number < 0:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))

    def _events(self, delta: Delta, sampled: Choice | Completion) -> Iterator[bytes]:
        """Events for new reasoning and text; tool calls come from the finished response."""
        if reasoning := delta.get("reasoning_content"):
            yield from self._write_reasoning(reasoning)
        if text := delta.get("content"):
            yield from self._begin_message()
            logprobs = self._deltas.logprobs(0, sampled) if self._request.logprobs else []
            self._text += text
            yield self._in_message("response.output_text.delta", delta=text, logprobs=logprobs)

    def _write_reasoning(self, text: str) -> Iterator[bytes]:
        if not self._reasoning:
            item = self._reasoning_item("")
            yield self._event("response.output_item.added", output_index=0, item={**item, "content": []})
            yield self._in_reasoning("response.content_part.added", part=item["content"][0])
        self._reasoning += text
        yield self._in_reasoning("response.reasoning_text.delta", delta=text)

    def _end_reasoning(self) -> Iterator[bytes]:
        if self._reasoning and not self._reasoning_ended:
            self._reasoning_ended = True
            item = self._reasoning_item(self._reasoning)
            yield self._in_reasoning("response.reasoning_text.done", text=self._reasoning)
            yield self._in_reasoning("response.content_part.done", part=item["content"][0])
            yield self._event("response.output_item.done", output_index=0, item=item)

    def _reasoning_item(self, text: str) -> dict[str, Any]:
        return reasoning_item(self._id, text, sealing=self._request.seals)

    def _in_reasoning(self, event: str, **fields: Any) -> bytes:
        item_id = self._reasoning_item("")["id"]
        return self._event(event, item_id=item_id, output_index=0, content_index=0, **fields)

    def _begin_message(self) -> Iterator[bytes]:
        yield from self._end_reasoning()
        if not self._message_begun:
            self._message_begun = True
            item = message_item(self._id, None, "in_progress")
            yield self._event("response.output_item.added", output_index=self._message_index, item=item)
            yield self._in_message("response.content_part.added", part=text_part(""))

    def _in_message(self, event: str, **fields: Any) -> bytes:
        item_id = message_item(self._id, None, "in_progress")["id"]
        return self._event(event, item_id=item_id, output_index=self._message_index, content_index=0, **fields)

    @property
    def _message_index(self) -> int:
        return int(bool(self._reasoning))

    def _function_call(self, index: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        at = {"item_id": item["id"], "output_index": index}
        arguments = item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **at, delta=arguments)
        yield self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _response(self, status: Status, **fields: Any) -> dict[str, Any]:
        return response_object(self._id, self._served.name, self._request.body, status, self._created, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        return sse({"type": kind, "sequence_number": self._sequence_number, **fields}, kind)
