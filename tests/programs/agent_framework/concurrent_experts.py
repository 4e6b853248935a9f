"""Two experts at the same time, one of whom searches; what they said is summed up by a direct call to the model."""

import asyncio
from collections.abc import Callable

from agent_framework import Agent, AgentExecutorResponse, Message
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import ConcurrentBuilder

client = OpenAIChatCompletionClient(model="gpt-4.1-mini")


async def search(query: str) -> str:
    """Search the archive, which takes a while."""
    await asyncio.sleep(0.5)
    return f"{query}: 12 papers"


def expert(subject: str, *tools: Callable) -> Agent:
    return Agent(client, f"You are an expert in {subject}. Answer in one line.", name=subject, tools=tools)


async def summarize(results: list[AgentExecutorResponse]) -> str:
    said = "\n".join(f"{result.executor_id}: {result.agent_response.text}" for result in results)
    response = await client.get_response(
        [Message("system", ["Sum the opinions up in one sentence."]), Message("user", [said])]
    )
    return f"{said}\nsummary: {response.text}"


async def main() -> None:
    experts = [expert("research", search), expert("marketing")]
    workflow = ConcurrentBuilder(participants=experts).with_aggregator(summarize).build()
    result = await workflow.run("We launch an electric bicycle.")
    for output in result.get_outputs():
        print(output)


if __name__ == "__main__":
    asyncio.run(main())
