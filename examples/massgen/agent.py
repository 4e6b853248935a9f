"""Agents that answer, see each other's answers and vote, in MassGen's manner. It imports nothing of agl.

They speak what docs/massgen.md asks of agents and orchestrators: `chat()` is an async generator, each has an id, and
the orchestrator keeps a list of events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
from openai import AsyncOpenAI


def _tool(name: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


ANSWER, VOTE = _tool("new_answer", "content"), _tool("vote", "agent_id")


class Agent:
    """A model behind an API, with a name."""

    def __init__(self, agent_id: str, client: AsyncOpenAI, model: str) -> None:
        self.agent_id, self.client, self.model = agent_id, client, model

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        current_stage: str | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        said = [{"role": "system", "content": f"You are {self.agent_id}."}, *messages]
        options: dict[str, Any] = {"tools": tools} if tools else {}
        stream = await self.client.chat.completions.create(
            model=self.model, messages=said, stream=True, max_completion_tokens=48, **options,
        )  # fmt: skip
        calls: dict[int, dict[str, str]] = {}
        async for part in stream:
            delta = part.choices[0].delta if part.choices else None
            if delta is not None and delta.content:
                yield {"type": "content", "content": delta.content}
            for piece in (delta.tool_calls or ()) if delta is not None else ():
                call = calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += piece.id or ""
                call["name"] += piece.function.name or ""
                call["arguments"] += piece.function.arguments or ""
        if calls:
            yield {"type": "tool_calls", "tool_calls": list(calls.values())}


class Orchestrator:
    """Every agent answers; every agent sees all answers, without names, and votes; the most votes win.

    Args:
        agents: by id. present: whether the winner presents its answer once more, in its own words.
    """

    orchestrator_id = "orchestrator"

    def __init__(self, agents: dict[str, Agent], present: bool = True) -> None:
        self.agents, self.present = agents, present
        self.events: list[dict[str, Any]] = []
        self.votes: dict[str, str] = {}

    async def chat(self, messages: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        question = messages[-1]["content"]
        answers: dict[str, str] = {}
        for agent_id, call in (await self._all(question, ANSWER)).items():
            answers[agent_id] = str(call.get("content", ""))
            self._event("new_answer", agent_id)
            yield {"type": "status", "content": f"{agent_id} has answered"}
        anonymous = {f"agent{i}": agent_id for i, agent_id in enumerate(sorted(self.agents), 1)}
        shown = "\n".join([question, *(f"{label}: {answers[agent_id]}" for label, agent_id in anonymous.items())])
        for agent_id, call in (await self._all(shown, VOTE)).items():
            # A vote for nobody is none.
            if (voted_for := anonymous.get(str(call.get("agent_id")))) is not None:
                self.votes[agent_id] = voted_for
                self._event("vote_cast", agent_id, voted_for=voted_for)
        winner = max(answers, key=Counter(self.votes.values()).__getitem__)
        self._event("final_agent_selected", winner)
        final = answers[winner]
        if self.present:
            request = [{"role": "user", "content": f"{shown}\nYours was chosen. Present it."}]
            said = [c async for c in self.agents[winner].chat(request, current_stage="presentation")]
            final = "".join(chunk["content"] for chunk in said if chunk["type"] == "content")
        self._event("final_answer", winner, answer=final)
        yield {"type": "content", "content": final}

    async def _all(self, text: str, tool: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The arguments with which each agent calls a tool; none for one that calls another, or none."""
        asked = await asyncio.gather(*(self._ask(agent, text, tool) for agent in self.agents.values()))
        return dict(zip(self.agents, asked, strict=True))

    async def _ask(self, agent: Agent, text: str, tool: dict[str, Any]) -> dict[str, Any]:
        chunks = [chunk async for chunk in agent.chat([{"role": "user", "content": text}], [tool])]
        for call in (call for chunk in chunks for call in chunk.get("tool_calls", ())):
            if call["name"] == tool["function"]["name"]:
                with contextlib.suppress(ValueError):
                    arguments = json.loads(call["arguments"])
                    return arguments if isinstance(arguments, dict) else {}
        return {}

    def _event(self, kind: str, agent_id: str, **context: Any) -> None:
        self.events.append({"event_type": kind, "agent_id": agent_id, "context": context})


def client(base_url: str, api_key: str) -> AsyncOpenAI:
    """A client for agents of any event loop: it keeps no connection of one for another."""
    unpooled = httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0))
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=unpooled, max_retries=0)
