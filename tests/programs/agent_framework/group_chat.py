"""A group chat in which an agent decides who speaks next; the events are streamed."""

import asyncio

from agent_framework import Agent, AgentResponse, AgentResponseUpdate
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import GroupChatBuilder


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    orchestrator = Agent(client=client, name="Orchestrator", instructions="You lead a team: researcher, then writer.")
    researcher = Agent(
        client=client, name="Researcher", description="Collects facts.", instructions="You collect facts."
    )
    writer = Agent(client=client, name="Writer", description="Writes answers.", instructions="You write the answer.")

    workflow = GroupChatBuilder(
        participants=[researcher, writer],
        orchestrator_agent=orchestrator,
        termination_condition=lambda messages: sum(m.role == "assistant" for m in messages) >= 4,
        intermediate_output_from=[researcher, writer],
    ).build()

    said: dict[str, str] = {}
    async for event in workflow.run("Why is the sky blue?", stream=True):
        if event.type == "intermediate" and isinstance(event.data, AgentResponseUpdate):
            said[event.executor_id] = said.get(event.executor_id, "") + event.data.text
        elif event.type == "output" and isinstance(event.data, AgentResponse | AgentResponseUpdate):
            said["final"] = said.get("final", "") + event.data.text
    for name, text in said.items():
        print(f"{name}: {text}")


if __name__ == "__main__":
    asyncio.run(main())
