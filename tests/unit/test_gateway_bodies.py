"""Bodies of all four dialects become the messages, and so the tokens, that they have always become: those of the first
three before `agl.messages` read them, those of Google's since there is that dialect. Neighbouring contents of Google's
model are one turn since then, and fields that Anthropic refuses in messages and blocks are refused instead of dropped,
as are names of tools that a provider refuses.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from scripted import new_access

from agl.trainer.gateway.dialects.chat.body import read as read_chat
from agl.trainer.gateway.dialects.google.body import read as read_google
from agl.trainer.gateway.dialects.messages.body import read as read_messages
from agl.trainer.gateway.dialects.responses.body import read as read_responses
from agl.trainer.rendering.normalise import normalise

READERS: dict[str, Any] = {
    "chat": read_chat, "messages": read_messages, "responses": read_responses, "google": read_google
}  # fmt: skip
RECORDED = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "gateway_bodies.jsonl").read_text().splitlines()
]
"""Bodies that Hypothesis made, each form once, with what the readers of each dialect gave chat templates."""


ANTHROPICS = {
    "message": ("role", "content"),
    "text": ("type", "text"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content", "is_error"),
}
"""Message or type of a block -> its fields, without the marks of caches."""


def anthropics(value: Any) -> Any:
    """A body's messages or its system prompt without what Anthropic refuses: fields of messages and blocks that it does
    not have. Hypothesis made some, and marks of caches that are none."""
    if isinstance(value, list):
        return [anthropics(each) for each in value]
    if not isinstance(value, dict):
        return value
    fields = ANTHROPICS[value.get("type", "message")]
    return {name: anthropics(value[name]) if name == "content" else value[name] for name in fields if name in value}


def renamed(tools: Any) -> Any:
    """Tools, whose functions get names that every provider takes, in their order."""
    tools = copy.deepcopy(tools)
    declared = [function for tool in tools or () for function in tool.get("functionDeclarations", [tool])]
    for i, function in enumerate(declared):
        function.get("function", function)["name"] = f"tool{i}"
    return tools


@pytest.mark.parametrize("dialect", READERS)
def test_a_body_gives_the_template_what_it_always_gave(dialect: str) -> None:
    recorded = [r for r in RECORDED if r["dialect"] == dialect]
    assert len(recorded) == 40
    for row in recorded:
        body = row["body"]
        if dialect == "messages":
            body = {**body, **{name: anthropics(body[name]) for name in ("messages", "system") if name in body}}
        if "tools" in body:
            body = {**body, "tools": renamed(body["tools"])}
        chat = READERS[dialect](body, new_access()).chat
        assert normalise(chat.messages, parse_arguments=True, developer=True) == row["messages"], row["body"]
        assert (chat.tools, sorted(chat.failed_tools)) == (renamed(row["tools"]), row["failed"]), row["body"]
