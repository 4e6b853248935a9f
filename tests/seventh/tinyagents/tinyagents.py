"""A tiny agent framework: agents with tools, over Chat Completions, and listeners that are told of every step.

An agent may be among another's tools; it is then asked by its name. Nothing here knows of agl.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, get_type_hints

import openai


@dataclass(eq=False)
class Step:
    """Something that an agent does.

    Attributes:
        kind: "agent", "model" or "tool". name: of the agent, the model or the tool.
        id, parent_id: of this step and of the one in which it lies; `parent_id` None for the outermost agent.
        input: the question, the messages, or a tool call of the model.
        output: the answer's text, the `ChatCompletion`, or the tool's result; None until the step has ended.
        error: the exception that left the step.
    """

    kind: str
    name: str
    input: Any
    parent_id: str | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    output: Any = None
    error: BaseException | None = None


class Listener(Protocol):
    """Is told of every step of every agent, in the thread and the context in which it begins and ends."""

    def started(self, step: Step) -> None: ...

    def ended(self, step: Step) -> None: ...


_listeners: list[Listener] = []
_tool_step: ContextVar[str | None] = ContextVar("tinyagents_tool_step", default=None)
"""The tool in which this code runs, so that an agent that a tool asks lies in it."""


def add_listener(listener: Listener) -> None:
    """Tell `listener` of every step from now on."""
    _listeners.append(listener)


def remove_listener(listener: Listener) -> None:
    """Undo `add_listener`."""
    _listeners.remove(listener)


@contextlib.contextmanager
def _step(kind: str, name: str, input: Any, parent_id: str | None) -> Iterator[Step]:
    step = Step(kind, name, input, parent_id)
    for listener in _listeners:
        listener.started(step)
    try:
        yield step
    except GeneratorExit:
        # A stream that is not read to its end.
        raise
    except BaseException as error:
        step.error = error
        raise
    finally:
        for listener in _listeners:
            listener.ended(step)


@contextlib.contextmanager
def _tool_run(call: Any, agent: Step) -> Iterator[Step]:
    with _step("tool", call.function.name, call, agent.id) as step:
        token = _tool_step.set(step.id)
        try:
            yield step
        finally:
            _tool_step.reset(token)


@dataclass(frozen=True)
class Tool:
    """What a model may call: a function, sync or async, under a name."""

    name: str
    function: Callable[..., Any]
    async_function: Callable[..., Any]
    description: str
    parameters: dict[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """As Chat Completions wants it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _tool(of: Any) -> Tool:
    if isinstance(of, Agent):
        question = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}
        return Tool(of.name, of.run, of.arun, of.instructions, question)

    async def in_thread(**arguments: Any) -> Any:
        return await of(**arguments) if inspect.iscoroutinefunction(of) else await asyncio.to_thread(of, **arguments)

    hints = get_type_hints(of)
    properties = {n: {"type": _JSON_TYPES.get(hints.get(n, str), "string")} for n in inspect.signature(of).parameters}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return Tool(of.__name__, of, in_thread, inspect.getdoc(of) or "", parameters)


class Agent:
    """A model that uses tools until it answers.

    Args:
        name: of the agent. model: the model's name.
        client, async_client: where the model is; made from the environment when first needed if None.
        tools: functions, or other agents. instructions: the system prompt.
    """

    def __init__(
        self,
        name: str,
        model: str,
        *,
        client: openai.OpenAI | None = None,
        async_client: openai.AsyncOpenAI | None = None,
        tools: Sequence[Any] = (),
        instructions: str = "",
    ) -> None:
        self.name, self.model, self.instructions = name, model, instructions
        self.tools = {tool.name: tool for tool in map(_tool, tools)}
        self._client, self._async_client = client, async_client

    def run(self, question: str) -> str:
        """The answer to a question."""
        with _step("agent", self.name, question, _tool_step.get()) as step:
            for text in self._turns(step, stream=False):
                step.output = text
        return step.output

    async def arun(self, question: str) -> str:
        """The answer to a question."""
        with _step("agent", self.name, question, _tool_step.get()) as step:
            async for text in self._aturns(step, stream=False):
                step.output = text
        return step.output

    def stream(self, question: str) -> Iterator[str]:
        """The answer in pieces."""
        with _step("agent", self.name, question, _tool_step.get()) as step:
            for text in self._turns(step, stream=True):
                step.output = (step.output or "") + text
                yield text

    async def astream(self, question: str) -> AsyncIterator[str]:
        """The answer in pieces."""
        with _step("agent", self.name, question, _tool_step.get()) as step:
            async for text in self._aturns(step, stream=True):
                step.output = (step.output or "") + text
                yield text

    def _turns(self, agent: Step, *, stream: bool) -> Iterator[str]:
        self._client = self._client or openai.OpenAI()
        completions = self._client.chat.completions
        messages = self._opening(agent.input)
        while True:
            with _step("model", self.model, [*messages], agent.id) as step:
                if stream:
                    with completions.stream(**self._request(messages)) as events:
                        for event in events:
                            if event.type == "content.delta":
                                yield event.delta
                        step.output = events.get_final_completion()
                else:
                    step.output = completions.create(**self._request(messages))
            message = step.output.choices[0].message
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            if not message.tool_calls:
                if not stream:
                    yield message.content or ""
                return
            for call in message.tool_calls:
                with _tool_run(call, agent) as step:
                    step.output = self.tools[call.function.name].function(**json.loads(call.function.arguments))
                messages.append(_answer(call, step.output))

    async def _aturns(self, agent: Step, *, stream: bool) -> AsyncIterator[str]:
        self._async_client = self._async_client or openai.AsyncOpenAI()
        completions = self._async_client.chat.completions
        messages = self._opening(agent.input)
        while True:
            with _step("model", self.model, [*messages], agent.id) as step:
                if stream:
                    async with completions.stream(**self._request(messages)) as events:
                        async for event in events:
                            if event.type == "content.delta":
                                yield event.delta
                        step.output = await events.get_final_completion()
                else:
                    step.output = await completions.create(**self._request(messages))
            message = step.output.choices[0].message
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            if not message.tool_calls:
                if not stream:
                    yield message.content or ""
                return
            for call in message.tool_calls:
                with _tool_run(call, agent) as step:
                    tool = self.tools[call.function.name]
                    step.output = await tool.async_function(**json.loads(call.function.arguments))
                messages.append(_answer(call, step.output))

    def _opening(self, question: str) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*system, {"role": "user", "content": question}]

    def _request(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        tools = {"tools": [tool.schema for tool in self.tools.values()]} if self.tools else {}
        return {"model": self.model, "messages": messages, **tools}


def _answer(call: Any, result: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": str(result)}
