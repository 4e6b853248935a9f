"""The attributes of the `chat` span of an Agent Framework response, whole or streamed."""

from __future__ import annotations

import json
from typing import Any

from agl import semconv


def facts(response: Any, content: bool) -> dict[str, Any]:
    """The attributes of a whole `ChatResponse`."""
    updates = UpdateCollector()
    updates.add(response)
    updates.usage = response.usage_details or {}
    updates.contents = [part for message in response.messages for part in message.contents]
    return updates.facts(content)


class UpdateCollector:
    """Collects what a stream's updates say of the whole response."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.usage: Any = {}
        self.contents: list[Any] = []

    def add(self, update: Any) -> None:
        """Read an update, which is not changed."""
        reason = getattr(update, "finish_reason", None)
        for name, value in (
            (semconv.RESPONSE_ID, getattr(update, "response_id", None)),
            (semconv.RESPONSE_MODEL, getattr(update, "model", None)),
            (semconv.FINISH_REASONS, [str(reason)] if reason else None),
        ):
            if value:
                self.known[name] = value
        for part in getattr(update, "contents", None) or ():
            if part.type == "usage":
                self.usage = part.usage_details or {}
            else:
                self.contents.append(part)

    def facts(self, content: bool) -> dict[str, Any]:
        """The attributes of a `chat` span."""
        attributes = {
            **self.known,
            semconv.INPUT_TOKENS: self.usage.get("input_token_count"),
            semconv.OUTPUT_TOKENS: self.usage.get("output_token_count"),
        }
        if content:
            attributes[semconv.OUTPUT_MESSAGES] = json.dumps([self._message()], default=str)
        return attributes

    def _message(self) -> dict[str, Any]:
        text, deltas = "", ""
        for part in self.contents:
            if part.type != "text":
                continue
            if getattr(part, "merge_mode", None) == "replace":
                # A Responses stream repeats a text, whole, when it is done.
                text, deltas = text + (part.text or ""), ""
            else:
                deltas += part.text or ""
        text += deltas
        calls: list[dict[str, Any]] = []
        for part in self.contents:
            if part.type != "function_call":
                continue
            if calls and part.call_id in ("", None, calls[-1]["id"]) and isinstance(part.arguments, str):
                calls[-1]["arguments"] += part.arguments
            else:
                arguments = part.arguments if isinstance(part.arguments, str) else json.dumps(part.arguments or {})
                calls.append({"id": part.call_id, "name": part.name, "arguments": arguments})
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
