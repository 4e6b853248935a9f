"""How an answer of OpenAI's Responses API ended, in the words of Chat Completions."""

from __future__ import annotations


def finish_reason(status: str | None, incomplete: str | None, *, calls_tools: bool) -> str | None:
    """The finish reason of a response; None while it is being made, or where it failed.

    Args:
        status: the response's. incomplete: `incomplete_details.reason`.
        calls_tools: whether it holds a function call.
    """
    if status == "incomplete":
        return "length" if incomplete in ("max_output_tokens", None) else incomplete
    if status != "completed":
        return None
    return "tool_calls" if calls_tools else "stop"
