"""A supervisor that sends the conversation to a researcher or a writer, by a graph whose nodes are prebuilt agents."""

from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command
from pydantic import BaseModel

model = ChatOpenAI(model="gpt-4.1-mini")


class Route(BaseModel):
    """Who works next."""

    next: Literal["researcher", "writer", "FINISH"]


@tool
def look_up(topic: str) -> str:
    """Look a topic up in the encyclopedia."""
    return f"{topic}: 8,849 metres high"


researcher = create_react_agent(model, [look_up], name="researcher", prompt="You look facts up.")
writer = create_react_agent(model, [], name="writer", prompt="You write one sentence.")


def supervisor(state: MessagesState) -> Command[Literal["researcher", "writer", "__end__"]]:
    route = model.with_structured_output(Route).invoke([("system", "Decide who works next."), *state["messages"]])
    return Command(goto=END if route.next == "FINISH" else route.next)


def call_researcher(state: MessagesState) -> Command[Literal["supervisor"]]:
    result = researcher.invoke(state)
    return Command(goto="supervisor", update={"messages": [("user", f"researcher: {result['messages'][-1].content}")]})


def call_writer(state: MessagesState) -> Command[Literal["supervisor"]]:
    result = writer.invoke(state)
    return Command(goto="supervisor", update={"messages": [("user", f"writer: {result['messages'][-1].content}")]})


graph = StateGraph(MessagesState)
graph.add_node("supervisor", supervisor)
graph.add_node("researcher", call_researcher)
graph.add_node("writer", call_writer)
graph.add_edge(START, "supervisor")
app = graph.compile()

for message in app.invoke({"messages": [("user", "How high is Everest?")]})["messages"]:
    print(f"{message.type}: {message.content}")
