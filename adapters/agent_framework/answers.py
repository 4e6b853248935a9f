"""The attributes of the `chat` span of an Agent Framework response, whole or streamed."""

from __future__ import annotations

from typing import Any

from agl import semconv
from agl.messages import Message, Other, Part, Reasoning, Text, ToolCall, write


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
            reasons = attributes.get(semconv.FINISH_REASONS) or ()
            attributes[semconv.OUTPUT_MESSAGES] = write.to_json([self._answer()], reasons)
        return attributes

    def _answer(self) -> Message:
        parts: list[Part] = []
        whole = True  # whether the last part is: what follows of its kind is another one
        for content in self.contents:
            # A Responses stream repeats a part, whole, when it is done.
            replaces, last = getattr(content, "merge_mode", None) == "replace", parts[-1] if parts else None
            match content.type:
                case "text" | "text_reasoning":
                    kind = Text if content.type == "text" else Reasoning
                    before = parts.pop().content if isinstance(last, kind) and not whole else ""  # type: ignore[union-attr]
                    parts.append(kind((content.text or "") if replaces else before + (content.text or "")))
                case "function_call":
                    call = ToolCall(content.call_id or "", content.name or "", content.arguments or "")
                    if isinstance(last, ToolCall) and call.id in ("", last.id) and isinstance(call.arguments, str):
                        parts.pop()
                        arguments = call.arguments if replaces else f"{last.arguments}{call.arguments}"
                        call = ToolCall(last.id, last.name, arguments)
                    parts.append(call)
                case _:
                    parts.append(Other(content.to_dict()))
            whole = replaces
        return Message("assistant", tuple(parts))
