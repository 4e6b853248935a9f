"""A writer and a reviewer in sequence, then an executor of one's own that counts words."""

import asyncio
from typing import Never

from agent_framework import AgentExecutorResponse, AgentResponse, Executor, Message, WorkflowContext, handler
from agent_framework.openai import OpenAIChatClient
from agent_framework.orchestrations import SequentialBuilder


class CountWords(Executor):
    @handler
    async def count(self, result: AgentExecutorResponse, ctx: WorkflowContext[Never, AgentResponse]) -> None:
        words = sum(len(message.text.split()) for message in result.full_conversation)
        await ctx.yield_output(AgentResponse(messages=[Message("assistant", [f"{words} words in all"])]))


async def main() -> None:
    client = OpenAIChatClient(model="gpt-4.1-mini")
    writer = client.as_agent(name="writer", instructions="You write slogans: one short sentence.")
    reviewer = client.as_agent(name="reviewer", instructions="You review slogans in a few words.")
    workflow = SequentialBuilder(
        participants=[writer, reviewer, CountWords(id="count_words")], intermediate_output_from=[writer, reviewer]
    ).build()

    result = await workflow.run("A slogan for a cheap electric bicycle.")
    for response in [*result.get_intermediate_outputs(), *result.get_outputs()]:
        print(response.text)


if __name__ == "__main__":
    asyncio.run(main())
