"""When two messages in the form of Chat Completions are the same message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import orjson


def digest(message: Mapping[str, Any]) -> bytes:
    """A hash of a message's content, equal for every form in which clients send back the same message.

    Clients re-serialise a tool call's JSON arguments, turn "" into null, split text into parts, drop the reasoning and
    add their own fields; none of that changes the content.
    """
    role = message.get("role")
    answered_id = message.get("tool_call_id") if role == "tool" else None
    calls = [(call.get("id"), call.get("function") or {}) for call in message.get("tool_calls") or ()]
    content = [role, text_of(message.get("content") or message.get("refusal")), answered_id]
    try:
        parsed = [[call_id, f.get("name"), _arguments(f.get("arguments"))] for call_id, f in calls]
        return hash_of(orjson.dumps([*content, parsed], option=orjson.OPT_SORT_KEYS))
    except orjson.JSONEncodeError:
        # Arguments nested too deep to be serialised are compared as text.
        raw = [[call_id, f.get("name"), f.get("arguments")] for call_id, f in calls]
        return hash_of(orjson.dumps([*content, raw], option=orjson.OPT_SORT_KEYS))


def text_of(content: Any) -> str:
    """A message's content as one text; parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(p if isinstance(p, str) else str(p.get("text", p.get("refusal", ""))) for p in content)


def _arguments(value: Any) -> Any:
    """Arguments as values. Python's JSON, which a model may write, also has NaN and half surrogate pairs."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value or "{}")
    except orjson.JSONDecodeError:
        pass
    try:
        return json.dumps(json.loads(value), sort_keys=True)
    except (ValueError, RecursionError):
        return value


def hash_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
