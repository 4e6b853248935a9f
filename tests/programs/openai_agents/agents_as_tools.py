"""Agents as tools: an orchestrator calls translators like functions, and an editor checks what came out."""

import asyncio

from agents import Agent, ItemHelpers, MessageOutputItem, Runner, trace

spanish = Agent(
    name="spanish_agent",
    instructions="You translate the user's message to Spanish.",
    handoff_description="An English to Spanish translator",
)
french = Agent(
    name="french_agent",
    instructions="You translate the user's message to French.",
    handoff_description="An English to French translator",
)
orchestrator = Agent(
    name="orchestrator_agent",
    instructions="You are a translation agent. Use the tools you are given; never translate on your own.",
    tools=[
        spanish.as_tool(tool_name="translate_to_spanish", tool_description="Translate the message to Spanish"),
        french.as_tool(tool_name="translate_to_french", tool_description="Translate the message to French"),
    ],
)
editor = Agent(
    name="editor_agent",
    instructions="You inspect translations, correct them if needed, and join them into one answer.",
)


async def main() -> None:
    with trace("Orchestrator evaluator"):
        found = await Runner.run(orchestrator, "Good morning, in Spanish and in French.")
        for item in found.new_items:
            if isinstance(item, MessageOutputItem):
                print(f"  - step: {ItemHelpers.text_message_output(item)}")
        joined = await Runner.run(editor, found.to_input_list())
    print(f"Final response: {joined.final_output}")


if __name__ == "__main__":
    asyncio.run(main())
