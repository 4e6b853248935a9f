"""A conversation over several turns: streamed, kept short by a window, and at the end a structured answer."""

import asyncio

from pydantic import BaseModel, Field
from strands import Agent, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.models.openai import OpenAIModel


class Profile(BaseModel):
    """What is known of the user."""

    name: str = Field(description="The first name")
    likes: list[str]


@tool
async def look_up(word: str) -> str:
    """Look a word up."""
    await asyncio.sleep(0)
    return f"{word}: a kind of fish"


friend = Agent(
    name="friend",
    model=OpenAIModel(model_id="gpt-4.1-mini"),
    system_prompt="You chat.",
    tools=[look_up],
    conversation_manager=SlidingWindowConversationManager(window_size=4),
    callback_handler=None,
)


async def main() -> None:
    for said in ("Hello, I am Ada.", "I like tench.", "What was my name?"):
        words = 0
        async for event in friend.stream_async(said):
            if "data" in event:
                words += 1
            elif event.get("current_tool_use") and event.get("delta"):
                print("a tool:", event["current_tool_use"]["name"])
            elif "result" in event:
                print(words, str(event["result"]).strip(), f"({len(friend.messages)} messages)")
    result = await friend.invoke_async("Who am I?", structured_output_model=Profile)
    print(repr(result.structured_output))


asyncio.run(main())
