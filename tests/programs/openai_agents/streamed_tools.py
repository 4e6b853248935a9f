"""`Runner.run_streamed`: tokens, tool calls and outputs as they happen; one tool fails, and the model is told."""

import asyncio

from agents import Agent, ItemHelpers, Runner, function_tool
from openai.types.responses import ResponseTextDeltaEvent
from opentelemetry import trace

tracer = trace.get_tracer("jokes")


@function_tool
def how_many_jokes() -> int:
    """How many jokes to tell."""
    with tracer.start_as_current_span("roll the dice"):
        return 2


@function_tool
def find_joke(topic: str) -> str:
    """Find a joke in the archive."""
    with tracer.start_as_current_span("search the archive"):
        raise FileNotFoundError(f"no joke about {topic}")


joker = Agent(
    name="Joker",
    instructions="First find out how many jokes to tell, then tell them.",
    tools=[how_many_jokes, find_joke],
)


async def main() -> None:
    with tracer.start_as_current_span("evening"):
        result = Runner.run_streamed(joker, input="Hello")
        async for event in result.stream_events():
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
                print(event.data.delta, flush=True)
            elif event.type == "agent_updated_stream_event":
                print("agent:", event.new_agent.name)
            elif event.type == "run_item_stream_event":
                if event.item.type == "tool_call_item":
                    print("called:", event.item.raw_item.name)
                elif event.item.type == "tool_call_output_item":
                    print("output:", event.item.output)
                elif event.item.type == "message_output_item":
                    print("said:", ItemHelpers.text_message_output(event.item))
    print("turns:", result.current_turn)


if __name__ == "__main__":
    asyncio.run(main())
