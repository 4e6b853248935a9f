"""A swarm: a flight agent and a hotel agent that hand the conversation to each other, and remember who is active."""

from typing import Annotated

from langchain.chat_models import init_chat_model
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, create_react_agent
from langgraph.types import Command


class SwarmState(MessagesState):
    active_agent: str


def create_handoff_tool(agent_name: str, description: str) -> BaseTool:
    name = f"transfer_to_{agent_name}"

    @tool(name, description=description)
    def handoff(state: Annotated[dict, InjectedState], tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        message = ToolMessage(f"Transferred to {agent_name}", name=name, tool_call_id=tool_call_id)
        return Command(
            goto=agent_name,
            graph=Command.PARENT,
            update={"messages": [*state["messages"], message], "active_agent": agent_name},
        )

    return handoff


@tool
def book_flight(origin: str, destination: str) -> str:
    """Book a flight."""
    return f"Booked a flight from {origin} to {destination}."


@tool
def book_hotel(city: str) -> str:
    """Book a hotel."""
    return f"Booked a hotel in {city}."


model = init_chat_model("openai:gpt-4.1-mini")
flight_assistant = create_react_agent(
    model,
    [book_flight, create_handoff_tool("hotel_assistant", "Ask the one who books hotels.")],
    prompt="You book flights.",
    name="flight_assistant",
)
hotel_assistant = create_react_agent(
    model,
    [book_hotel, create_handoff_tool("flight_assistant", "Ask the one who books flights.")],
    prompt="You book hotels.",
    name="hotel_assistant",
)

builder = StateGraph(SwarmState)
builder.add_node("flight_assistant", flight_assistant)
builder.add_node("hotel_assistant", hotel_assistant)
builder.add_conditional_edges(
    START, lambda state: state.get("active_agent", "flight_assistant"), ["flight_assistant", "hotel_assistant"]
)
swarm = builder.compile(checkpointer=InMemorySaver())

config = {"configurable": {"thread_id": "1"}}
for question in ("Book a flight from Bonn to Rome, and a hotel there.", "And a hotel in Pisa."):
    result = swarm.invoke({"messages": [{"role": "user", "content": question}]}, config)
    print(result["active_agent"], "says:", result["messages"][-1].content)
