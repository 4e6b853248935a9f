"""The one seam between an environment and a policy: `ask(messages, tools)` gives the policy's next answer.

An environment that brings its own loop gets its answers there, too, so all kinds are scored, replayed and blamed alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

Message = dict[str, Any]
"""A message as Chat Completions has it."""


class Ask(Protocol):
    """Answers a conversation. `error` is what its last request raised, None while all have been answered."""

    error: Exception | None
    answers: list[Message]

    async def __call__(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> ChatCompletion:
        """The answer to these messages; `tools` are functions as Chat Completions has them."""
        ...


class Model:
    """Asks an OpenAI-compatible model."""

    def __init__(self, client: AsyncOpenAI, model: str, sampling: Mapping[str, Any]) -> None:
        self._client, self._model, self._sampling = client, model, dict(sampling)
        self.error: Exception | None = None
        self.answers: list[Message] = []

    async def __call__(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> ChatCompletion:
        try:
            create: Any = self._client.chat.completions.create
            offered = {"tools": list(tools)} if tools else {}
            completion = await create(model=self._model, messages=list(messages), **offered, **self._sampling)
        except Exception as error:
            self.error = error
            raise
        self.answers.append(message_of(completion))
        return completion


class Replay:
    """Gives answers that are known already, then empty ones.

    Args:
        output: a text, or the answers in order: texts, or messages with "content" and "tool_calls".
    """

    def __init__(self, output: object) -> None:
        answers = output if isinstance(output, Sequence) and not isinstance(output, str) else [output]
        self.error: Exception | None = None
        self.answers: list[Message] = [dict(a) if isinstance(a, Mapping) else {"content": str(a)} for a in answers]
        self._next: Iterator[Message] = iter(self.answers)

    async def __call__(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> ChatCompletion:
        answer = {"content": None, **next(self._next, {"content": ""}), "role": "assistant"}
        finish = "tool_calls" if answer.get("tool_calls") else "stop"
        return ChatCompletion.model_validate(
            {
                "id": f"replay-{len(messages)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": "replay",
                "choices": [{"index": 0, "message": answer, "finish_reason": finish}],
            }
        )


def message_of(completion: ChatCompletion) -> Message:
    """The answer as the next request has it: "role", "content", and "tool_calls" where there are some."""
    message = completion.choices[0].message
    calls = [call.model_dump(exclude_none=True) for call in message.tool_calls or ()]
    return {"role": "assistant", "content": message.content or "", **({"tool_calls": calls} if calls else {})}


def tool_calls(message: Message) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """(id, name, arguments) of each tool call; the arguments are None where they are no JSON object."""
    for call in message.get("tool_calls") or ():
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        yield call["id"], call["function"]["name"], arguments if isinstance(arguments, dict) else None


def function_tool(name: str, description: str, parameters: Mapping[str, Any]) -> Message:
    """A tool as Chat Completions has it."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}
