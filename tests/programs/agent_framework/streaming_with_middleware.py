"""A streamed run with middleware around the agent, its model calls and its tools."""

import asyncio
from collections.abc import Awaitable, Callable

from agent_framework import (
    Agent,
    AgentContext,
    ChatContext,
    FunctionInvocationContext,
    FunctionMiddleware,
    Message,
    agent_middleware,
    chat_middleware,
)
from agent_framework.openai import OpenAIChatCompletionClient

log: list[str] = []


@agent_middleware
async def name_the_agent(context: AgentContext, call_next: Callable[[], Awaitable[None]]) -> None:
    log.append(f"agent {context.agent.name}")
    await call_next()


@chat_middleware
async def stay_polite(context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
    context.messages = [*context.messages, Message("user", ["Be polite."])]
    log.append("model call")
    await call_next()


class Approve(FunctionMiddleware):
    async def process(self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]) -> None:
        await call_next()
        log.append(f"tool {context.function.name}")


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It is sunny in {city}."


async def main() -> None:
    agent = Agent(
        client=OpenAIChatCompletionClient(model="gpt-4.1-mini"),
        name="WeatherAgent",
        instructions="You tell the weather.",
        tools=get_weather,
        middleware=[name_the_agent, stay_polite, Approve()],
    )
    stream = agent.run("What is the weather in Oslo?", stream=True)
    async for update in stream:
        print(update.text, end="")
    final = await stream.get_final_response()
    print(f"\n{len(final.messages)} messages; {', '.join(log)}")


asyncio.run(main())
