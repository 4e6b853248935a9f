"""The events of an agent's stream: tokens of its models, and the tools that it calls; and of a chain in a tool."""

import asyncio

from langchain.agents import create_agent
from langchain.tools import ToolRuntime, tool
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="gpt-4.1-mini", temperature=0, streaming=True)
gist = ChatPromptTemplate.from_template("Sum up: {text}") | model.with_config(tags=["gist"])


@tool
async def read_page(url: str, runtime: ToolRuntime) -> str:
    """Read a page of the web, and sum it up."""
    runtime.stream_writer({"reading": url})
    return (await gist.ainvoke({"text": f"All of {url}"})).text


agent = create_agent(model, [read_page], system_prompt="You read the web.", name="reader")


async def main() -> None:
    question = {"messages": [{"role": "user", "content": "What do a.com and b.com say?"}]}
    ended, tokens = [], {"agent": 0, "gist": 0}
    async for event in agent.astream_events(question, version="v2"):
        match event["event"]:
            case "on_chat_model_stream" if event["data"]["chunk"].text:
                tokens["gist" if "gist" in event["tags"] else "agent"] += 1
            case "on_tool_end":
                ended.append((event["name"], event["data"]["input"]["url"], event["data"]["output"].content))
            case "on_chain_end" if event["name"] == "reader":
                print(event["data"]["output"]["messages"][-1].text)
    print(sorted(ended), tokens)


asyncio.run(main())
