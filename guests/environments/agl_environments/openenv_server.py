"""Environments of OpenEnv: a server at an address, one session per rollout, actions in the form that it asks for."""

# The package may be missing where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any, Literal

from openenv import GenericEnvClient

from agl.errors import ConfigError
from agl_environments.asking import Ask, Message, function_tool, message_of, tool_calls

_HIDDEN = ("metadata", "done", "reward")


class OpenEnv:
    """A running server, by its URL.

    If its actions are one text, the policy's answer is the action; else the policy calls the tool `act`.

    Args:
        system: a system prompt.
        max_turns: after so many the episode ends.
        reset: more arguments of `reset`.
        score: "sum" of the steps' rewards, or the "last" one.
        floor: the score of an episode that the policy ends with an answer that is no action; no other may be lower.
    """

    def __init__(
        self,
        url: str,
        *,
        system: str | None = None,
        max_turns: int = 50,
        reset: Mapping[str, Any] | None = None,
        score: Literal["sum", "last"] = "sum",
        floor: float = 0.0,
    ) -> None:
        if score not in ("sum", "last"):
            raise ConfigError(f"score={score!r}", hint="'sum' or 'last'")
        self._url = url.rstrip("/")
        self._system = system
        self._turns = max_turns
        self._reset = dict(reset or {})
        self._score = score
        self._floor = floor
        try:
            with urllib.request.urlopen(f"{self._url}/schema", timeout=10) as response:
                action = json.load(response)["action"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"no OpenEnv server answers at {self._url}: {error}", hint="start it first") from error
        self._parameters = {k: v for k, v in action.items() if k not in ("title", "description")}
        fields = {k: v for k, v in action.get("properties", {}).items() if k not in _HIDDEN}
        self._parameters["properties"] = fields
        self._text = next(iter(fields)) if [f.get("type") for f in fields.values()] == ["string"] else None
        self._tool = function_tool("act", action.get("description", "Act in the environment."), self._parameters)

    def tasks(self, n: int | None, seed: int) -> list[dict[str, Any]]:
        return [{"url": self._url, "reset": {**self._reset, "seed": seed + i}} for i in range(n or 100)]

    async def play(self, task: Mapping[str, Any], ask: Ask) -> float:
        async with GenericEnvClient(base_url=task["url"]) as server:
            result = await server.reset(**task["reset"])
            messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
            messages.append({"role": "user", "content": _seen(result.observation)})
            total = last = 0.0
            for _ in range(self._turns):
                messages.append(message_of(await ask(messages, None if self._text else [self._tool])))
                action, call_id = self._action(messages[-1])
                if action is None:
                    return self._floor
                try:
                    result = await server.step(action)
                except RuntimeError as error:
                    # The client has no class of its own for what the server did not accept.
                    if "(code: VALIDATION_ERROR)" in str(error):
                        return self._floor
                    raise
                last = float(result.reward or 0.0)
                total += last
                if result.done:
                    break
                role = {"role": "tool", "tool_call_id": call_id} if call_id else {"role": "user"}
                messages.append({**role, "content": _seen(result.observation)})
            return total if self._score == "sum" else last

    def _action(self, answer: Message) -> tuple[dict[str, Any] | None, str | None]:
        """The action in an answer, None if there is none, and the id of its tool call."""
        if self._text:
            return ({self._text: answer["content"]} if answer["content"].strip() else None), None
        calls = list(tool_calls(answer))
        if len(calls) != 1 or calls[0][1] != "act":
            return None, None
        return calls[0][2], calls[0][0]


def _seen(observation: Mapping[str, Any]) -> str:
    """An observation as the policy reads it: its text if it is one, else JSON."""
    fields = {k: v for k, v in observation.items() if k not in _HIDDEN}
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)
