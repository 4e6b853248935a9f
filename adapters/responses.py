"""The finish reason of a response of OpenAI's Responses API, in the words of Chat Completions."""

from __future__ import annotations


def finish_reason(status: str | None, incomplete: str | None, *, calls_tools: bool) -> str | None:
    """The finish reason of a response; None if it is not finished or failed.

    Args:
        status: `response.status`. incomplete: `response.incomplete_details.reason`.
        calls_tools: whether it holds a function call.
    """
    if status == "incomplete":
        return "length" if incomplete in ("max_output_tokens", None) else incomplete
    if status != "completed":
        return None
    return "tool_calls" if calls_tools else "stop"
