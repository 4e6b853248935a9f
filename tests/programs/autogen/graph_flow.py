"""A graph: a draft goes to two editors at the same time, and their reviewer may send it back."""

import asyncio

from autogen_agentchat.agents import AssistantAgent, MessageFilterAgent, MessageFilterConfig, PerSourceFilter
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def style_guide() -> str:
    """Read the style guide, which takes a while."""
    await asyncio.sleep(0.5)
    return "Short sentences."


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    writer = AssistantAgent("writer", model_client=client, system_message="Draft a paragraph on climate change.")
    grammar = AssistantAgent("grammar_editor", model_client=client, system_message="Correct the grammar.")
    style = AssistantAgent(
        "style_editor",
        model_client=client,
        tools=[style_guide],
        system_message="Improve the style.",
        reflect_on_tool_use=True,
    )
    reviewer = AssistantAgent("reviewer", model_client=client, system_message="Say REVISE or ACCEPT.")
    summarizer = MessageFilterAgent(
        name="summarizer_filter",
        wrapped_agent=AssistantAgent("summarizer", model_client=client, system_message="Summarize in five words."),
        filter=MessageFilterConfig(per_source=[PerSourceFilter(source="reviewer", position="last", count=1)]),
    )

    builder = DiGraphBuilder()
    for agent in (writer, grammar, style, reviewer, summarizer):
        builder.add_node(agent, activation="any" if agent is writer else "all")
    builder.add_edge(writer, grammar).add_edge(writer, style)
    builder.add_edge(grammar, reviewer).add_edge(style, reviewer)
    builder.add_edge(reviewer, writer, condition="REVISE").add_edge(reviewer, summarizer, condition="ACCEPT")
    builder.set_entry_point(writer)

    flow = GraphFlow(builder.get_participants(), graph=builder.build(), termination_condition=MaxMessageTermination(20))
    said = [
        f"{event.source}: {event.content}" async for event in flow.run_stream(task="Go.") if hasattr(event, "source")
    ]
    print("\n".join(sorted(said)))
    await client.close()


asyncio.run(main())
