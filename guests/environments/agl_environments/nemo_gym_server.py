"""Resource servers of NeMo Gym: tasks in a JSONL file, tools and `/verify` at an address.

A task's requests are in the form of OpenAI's Responses API; the policy is asked in that of Chat Completions.
"""

from __future__ import annotations

import json
import random
import time
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from agl.errors import ConfigError, DatasetError
from agl.messages import read, write
from agl_environments.asking import Ask, Message, message_of, tool_calls


class NemoGym:
    """A running server, by its URL.

    Args:
        tasks: the server's JSONL file, such as `data/example.jsonl`, or its rows.
        max_turns: after so many answers with tool calls the run is graded as it is.
    """

    def __init__(self, url: str, *, tasks: str | Path | Sequence[Mapping[str, Any]], max_turns: int = 20) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address", hint="nemo-gym:http://host:port of a running resource server")
        self._url = url.rstrip("/")
        self._turns = max_turns
        try:
            lines = Path(tasks).read_text("utf-8").splitlines() if isinstance(tasks, str | Path) else ()
            rows = [json.loads(line) for line in lines if line.strip()] or [dict(row) for row in tasks]  # type: ignore[arg-type]
            self._rows = [row for row in rows if row["responses_create_params"]["input"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"these are no tasks of NeMo Gym: {error!r}", path=tasks) from error

    def tasks(self, n: int | None, seed: int) -> list[dict[str, Any]]:
        return random.Random(seed).sample(self._rows, len(self._rows))[:n]

    async def play(self, task: Mapping[str, Any], ask: Ask) -> float:
        params = task["responses_create_params"]
        sent = [{"role": "user", "content": params["input"]}] if isinstance(params["input"], str) else params["input"]
        system = [{"role": "system", "content": params["instructions"]}] if params.get("instructions") else []
        messages: list[Message] = [*system, *write.to_openai(read.messages(sent))]
        tools = read.tools(params.get("tools"))
        output: list[dict[str, Any]] = []
        # A session is known by its cookie, also at an address that is a number.
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            await self._post(session, "seed_session", task)
            for _ in range(self._turns):
                messages.append(message_of(await ask(messages, tools)))
                output += _items(messages[-1])
                calls = list(tool_calls(messages[-1]))
                if not calls:
                    break
                for call_id, name, arguments in calls:
                    result = await self._tool(session, name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
                    output.append({"type": "function_call_output", "call_id": call_id, "output": result})
            response = {
                "id": f"resp_{uuid.uuid4().hex}",
                "object": "response",
                "created_at": time.time(),
                "model": "policy",
                "output": output,
                "parallel_tool_calls": True,
                "tool_choice": "auto",
                "tools": params.get("tools") or [],
            }
            return (await self._post(session, "verify", {**task, "response": response}))["reward"]

    async def _post(self, session: aiohttp.ClientSession, path: str, body: object) -> Any:
        async with session.post(f"{self._url}/{path}", json=body) as response:
            if response.status >= 400:
                raise RuntimeError(f"POST /{path} answered {response.status}: {(await response.text())[:500]}")
            return await response.json()

    async def _tool(self, session: aiohttp.ClientSession, name: str, arguments: dict[str, Any] | None) -> str:
        """What a tool answers. Its refusals are for the policy, as in NeMo Gym's own agents."""
        if arguments is None:
            return json.dumps({"error": "the arguments are no JSON object"})
        if name in ("seed_session", "verify", "aggregate_metrics"):
            return json.dumps({"error": f"there is no tool {name}"})
        async with session.post(f"{self._url}/{urllib.parse.quote(name, safe='')}", json=arguments) as response:
            return await response.text()


def _items(answer: Message) -> list[dict[str, Any]]:
    """An answer as the Responses API has it."""
    items: list[dict[str, Any]] = []
    if answer["content"] or not answer.get("tool_calls"):
        text = {"type": "output_text", "text": answer["content"], "annotations": []}
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [text]})
    for call in answer.get("tool_calls") or ():
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        items.append({"type": "function_call", "call_id": call["id"], **function, "status": "completed"})
    return items
