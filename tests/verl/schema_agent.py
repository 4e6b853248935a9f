"""An agent that requests answers within a schema: as JSON, as a call that it forces, or as a call of a strict tool."""

from __future__ import annotations

from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

import agl


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["add", "sub"]
    n: int = Field(ge=0, le=99)


_TOOL = {"name": "answer", "strict": True, "parameters": Sum.model_json_schema()}
WAYS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": Sum.model_json_schema()}}},
    {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
    {"tools": [{"type": "function", "function": _TOOL}]},
)


@agl.rollout
def structured(task: dict[str, str], llm: agl.LLM) -> float:
    """The number that it answers with, as the reward; text that is no call of the strict tool is worth 0."""
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    way = WAYS[int(task["answer"]) % len(WAYS)]
    messages: Any = [{"role": "user", "content": task["question"]}]
    message = client.chat.completions.create(model=llm.model, messages=messages, **way).choices[0].message
    texts = [call.function.arguments for call in message.tool_calls or () if call.type == "function"]
    if "tool_choice" not in way and not texts:
        assert "<tool_call>" not in (message.content or "")
        return 0.0
    return max(Sum.model_validate_json(text).n for text in texts or [message.content or ""]) / 99
