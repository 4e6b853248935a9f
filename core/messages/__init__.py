"""Messages of any model API and framework as one type: `read` makes them, `write` brings them into another's form.

On spans they stand in OpenTelemetry's form, as the attributes' names say; `read` also takes every form that an earlier
version recorded. What cannot be read raises UnreadableMessageError: nothing becomes an empty text.
"""

from agl.messages import read, write
from agl.messages.types import Message, Other, Part, Reasoning, Text, ToolCall, ToolResult

__all__ = ["Message", "Other", "Part", "Reasoning", "Text", "ToolCall", "ToolResult", "read", "write"]
