"""A LangGraph graph: one node runs an agent of the OpenAI Agents SDK, the next one a chain that puts it politely."""

import asyncio
from typing import TypedDict

from agents import Agent, Runner, function_tool
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph


class Ticket(TypedDict, total=False):
    """What the nodes know."""

    question: str
    finding: str
    answer: str


@function_tool
def status(machine: str) -> str:
    """Ask a machine for its status."""
    return f"{machine} is out of paper"


technician = Agent(name="Technician", instructions="Find out what is wrong.", tools=[status], model="gpt-4.1-mini")
polite = ChatPromptTemplate.from_messages([("system", "Answer politely."), ("user", "{question}\n{finding}")])
chain = polite | ChatOpenAI(model="gpt-4.1-mini", temperature=0)


async def diagnose(state: Ticket) -> Ticket:
    result = await Runner.run(technician, state["question"])
    return {"finding": result.final_output}


async def reply(state: Ticket) -> Ticket:
    message = await chain.ainvoke(state)
    return {"answer": message.content}


builder = StateGraph(Ticket)
builder.add_node("diagnose", diagnose)
builder.add_node("reply", reply)
builder.add_edge(START, "diagnose")
builder.add_edge("diagnose", "reply")
builder.add_edge("reply", END)
help_desk = builder.compile(name="help_desk")

print(asyncio.run(help_desk.ainvoke({"question": "Why does the printer not print?"})))
