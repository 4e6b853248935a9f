"""Streams: text as it comes, a structured output as it grows, and the events of a run with a tool."""

import asyncio
from collections.abc import AsyncIterable

from pydantic_ai import Agent, AgentStreamEvent, FunctionToolCallEvent, FunctionToolResultEvent, RunContext
from typing_extensions import TypedDict


class Whale(TypedDict, total=False):
    """One kind of whale."""

    name: str
    metres: float


narrator = Agent("openai-chat:gpt-4.1-mini", name="narrator", instructions="Tell about the sea.")
biologist = Agent("openai-chat:gpt-4.1-mini", name="biologist", output_type=list[Whale], instructions="List whales.")


@narrator.tool_plain
def depth(sea: str) -> int:
    """The depth of a sea, in metres."""
    return {"Baltic": 459}.get(sea, 3000)


async def told(ctx: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
    async for event in events:
        show(event)


def show(event: AgentStreamEvent) -> None:
    match event:
        case FunctionToolCallEvent():
            print("calls", event.part.tool_name, event.part.args_as_dict())
        case FunctionToolResultEvent():
            print("got", event.part.content)


async def main() -> None:
    async with narrator.run_stream("How deep is the Baltic Sea?", event_stream_handler=told) as stream:
        async for text in stream.stream_text(debounce_by=None):
            print("|", text)
    async with biologist.run_stream("Two whales.") as whales:
        print(await whales.get_output())
        print(whales.usage.requests, "request")


asyncio.run(main())
