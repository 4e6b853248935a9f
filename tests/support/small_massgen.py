"""A small MassGen, of the protocol of `agl.massgen` and with what is awkward about the real one: each chunk is taken in
a task of its own, an agent that is restarted has its stream closed half-way, agents know each other by anonymous ids,
and the winner presents its answer once more.

`as_massgen()` serves it as `massgen` where that is not installed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from openai import AsyncOpenAI


@dataclass
class Chunk:
    type: str
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    error: str | None = None
    tool_call_id: str | None = None


class Backend:
    """A model behind an API, by OpenAI's SDK, streaming."""

    def __init__(self, model: str, url: str | None = None) -> None:
        self.model, self.url = model, url

    async def stream(self, messages: list[dict[str, Any]], tools: Any = None) -> AsyncIterator[Chunk]:
        client = AsyncOpenAI(base_url=self.url, api_key="sk-own", max_retries=0)
        options: dict[str, Any] = {"tools": tools} if tools else {}
        calls: list[dict[str, Any]] = []
        async for part in await client.chat.completions.create(
            model=self.model, messages=messages, stream=True, stream_options={"include_usage": True}, **options,
        ):  # fmt: skip
            for choice in part.choices:
                if choice.delta.content:
                    yield Chunk("content", choice.delta.content)
                for call in choice.delta.tool_calls or ():
                    function = {"name": call.function.name, "arguments": call.function.arguments}
                    calls.append({"id": call.id, "type": "function", "function": function})
        if calls:
            yield Chunk("tool_calls", tool_calls=calls)
        yield Chunk("done")


@dataclass
class AgentConfig:
    model: str

    @classmethod
    def create_openai_config(cls, model: str) -> AgentConfig:
        return cls(model)

    def create_backend(self) -> Backend:
        return Backend(self.model)


class SingleAgent:
    def __init__(self, backend: Any, agent_id: str | None = None) -> None:
        self.backend, self.agent_id = backend, agent_id

    async def chat(self, messages: Any, tools: Any = None, *, current_stage: Any = None) -> AsyncIterator[Chunk]:
        async for chunk in self.backend.stream(messages, tools):
            yield chunk


@dataclass
class Tracker:
    agents: list[str]
    events: list[Any] = field(default_factory=list)

    def add(self, kind: str, agent_id: str | None, **context: Any) -> None:
        self.events.append({"event_type": kind, "agent_id": agent_id, "context": context})

    def get_anonymous_agent_mapping(self) -> dict[str, str]:
        return {f"agent{i}": name for i, name in enumerate(sorted(self.agents), 1)}


class Orchestrator:
    """An agent that answers restarts all others: they begin again with its answer. Who votes waits for the others."""

    def __init__(self, agents: dict[str, Any], orchestrator_id: str = "orchestrator") -> None:
        self.agents, self.orchestrator_id = agents, orchestrator_id
        self.coordination_tracker = Tracker([*agents])
        self.answers: dict[str, str] = {}
        self.votes: dict[str, str] = {}

    async def chat(self, messages: list[dict[str, Any]]) -> AsyncIterator[Chunk]:
        question, tracker = messages[-1]["content"], self.coordination_tracker
        tracker.add("session_start", None)
        streams = {name: self._begin(name, question) for name in self.agents}
        while streams:
            taken = {name: asyncio.create_task(anext(s, None)) for name, s in streams.items()}
            await asyncio.wait(taken.values())
            for name, task in taken.items():
                if name not in streams:
                    continue
                chunk = task.result()
                if chunk is None:
                    del streams[name]
                for call in (chunk.tool_calls or ()) if chunk is not None else ():
                    arguments = json.loads(call["function"]["arguments"])
                    await streams.pop(name).aclose()
                    if call["function"]["name"] == "vote":
                        # In anonymous ids, as agents say it.
                        self.votes[name] = arguments["agent_id"]
                        tracker.add("vote_cast", name, voted_for=arguments["agent_id"], reason="right")
                    else:
                        self.answers[name] = arguments["content"]
                        tracker.add("new_answer", name)
                        tracker.add("restart_triggered", name, affected_agents=[*self.agents])
                        self.votes.clear()
                        for other, stream in streams.items():
                            await stream.aclose()
                            await asyncio.gather(taken[other], return_exceptions=True)
                        streams = {name: self._begin(name, question) for name in self.agents}
                        break
                    break
            yield Chunk("status")
        real = tracker.get_anonymous_agent_mapping()
        winner = real[Counter(self.votes.values()).most_common(1)[0][0]]
        tracker.add("final_agent_selected", winner)
        request = [{"role": "user", "content": "present"}]
        said = [c async for c in self.agents[winner].chat(request, current_stage="presentation")]
        tracker.add("final_answer", winner, answer="".join(c.content or "" for c in said))
        for chunk in said:
            yield chunk

    def _begin(self, name: str, question: str) -> Any:
        shown = {label: self.answers.get(real) for label, real in
                 self.coordination_tracker.get_anonymous_agent_mapping().items()}  # fmt: skip
        text = f"{question}\n{json.dumps(shown)}"
        return self.agents[name].chat([{"role": "user", "content": text}], [TOOL])


TOOL = {"type": "function", "function": {"name": "vote", "parameters": {"type": "object", "properties": {}}}}


@contextmanager
def as_massgen() -> Iterator[None]:
    """Serves these names as `massgen` and `massgen.chat_agent`, and leaves nothing behind."""
    package, chat_agent = ModuleType("massgen"), ModuleType("massgen.chat_agent")
    package.__path__ = []
    package.AgentConfig, package.Orchestrator = AgentConfig, Orchestrator  # type: ignore[attr-defined]
    chat_agent.SingleAgent = SingleAgent  # type: ignore[attr-defined]
    sys.modules |= {"massgen": package, "massgen.chat_agent": chat_agent}
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n == "massgen" or n.startswith("massgen.")]:
            del sys.modules[name]
