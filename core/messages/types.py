"""What a message is: who speaks, and the parts of what is said, in order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is said."""

    content: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What a model thought before its answer."""

    content: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model.

    Attributes:
        id: "" for none.
        name: of the tool.
        arguments: JSON text as the model wrote it, or the value that an API or a framework parsed.
    """

    id: str
    name: str
    arguments: Any = ""

    @property
    def json_arguments(self) -> str:
        """The arguments as JSON text; "{}" for none."""
        if isinstance(self.arguments, str):
            return self.arguments or "{}"
        return json.dumps({} if self.arguments is None else self.arguments, ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returned.

    Attributes:
        id: of the call that it answers; "" for none.
        content: a text, or the unchanged parts if one of them is not text.
        failed: whether it is marked as an error.
    """

    id: str
    content: Any
    failed: bool = False

    @property
    def text(self) -> str:
        """The content as one text, other parts as JSON."""
        return self.content if isinstance(self.content, str) else json.dumps(self.content, default=str)


@dataclass(frozen=True, slots=True)
class Other:
    """A part of any other kind (an image, a file, a search that the provider ran), unchanged."""

    value: Mapping[str, Any]


Part = Text | Reasoning | ToolCall | ToolResult | Other


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool"; APIs may have further ones.
        parts: in order.
        name: of who speaks, where there are several of a role.
    """

    role: str
    parts: tuple[Part, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """Its texts, joined, without reasoning and tool results."""
        return "".join(p.content for p in self.parts if isinstance(p, Text))

    @property
    def reasoning(self) -> str:
        """Its reasoning, joined."""
        return "".join(p.content for p in self.parts if isinstance(p, Reasoning))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Its tool calls."""
        return tuple(p for p in self.parts if isinstance(p, ToolCall))

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        """Its tool results."""
        return tuple(p for p in self.parts if isinstance(p, ToolResult))
