"""Two agents of a help desk, as a LangGraph program: one sorts a ticket, one writes the first answer to the customer.

Their prompts say what to do, and none of the house's rules. It imports nothing from agl.
"""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

PROMPTS = {
    "sorter": "Sort the ticket. Say `queue urgency`: billing or technical, then urgent or normal.",
    "writer": "Write the first answer to the customer, in one sentence.",
}


class State(TypedDict, total=False):
    """`ticket` is the input; `sorted` and `answer` are what the agents said."""

    ticket: str
    sorted: str
    answer: str


def build(base_url: str, model: str, api_key: str) -> Any:
    """The program, on the model of a server that speaks OpenAI's protocol."""
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key)  # type: ignore[arg-type]

    async def ask(agent: str, text: str) -> str:
        return (await chat.ainvoke([SystemMessage(PROMPTS[agent]), HumanMessage(text)])).text

    async def sorter(state: State) -> State:
        return {"sorted": await ask("sorter", state.get("ticket", ""))}

    async def writer(state: State) -> State:
        return {"answer": await ask("writer", f"{state.get('ticket', '')}\nSorted: {state.get('sorted', '')}")}

    graph = StateGraph(State)
    graph.add_node("sorter", sorter)
    graph.add_node("writer", writer)
    graph.add_edge(START, "sorter")
    graph.add_edge("sorter", "writer")
    graph.add_edge("writer", END)
    return graph.compile(name="help_desk")
