"""A human in the loop: a tool that interrupts the graph until somebody approves, and a graph that is resumed."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command, interrupt
from opentelemetry import trace

tracer = trace.get_tracer("travel")


@tool
def book_hotel(hotel: str) -> str:
    """Book a hotel."""
    answer = interrupt({"question": f"Book {hotel}?"})
    with tracer.start_as_current_span("booking"):
        if answer["type"] == "accept":
            return f"Booked {hotel}."
        if answer["type"] == "edit":
            return f"Booked {answer['hotel']}."
        return "The user says no."


@tool
def find_hotels(city: str) -> list[str]:
    """Find the hotels of a city."""
    return [f"Hotel {city}", f"{city} Inn"]


agent = create_react_agent(
    ChatOpenAI(model="gpt-4.1-mini"),
    [find_hotels, book_hotel],
    prompt="You book hotels.",
    name="travel_agent",
    checkpointer=InMemorySaver(),
)

for thread, answer in (("1", {"type": "accept"}), ("2", {"type": "edit", "hotel": "Bonn Inn"}), ("3", {"type": "no"})):
    config = {"configurable": {"thread_id": thread}}
    state = agent.invoke({"messages": [{"role": "user", "content": "Book me a stay in Bonn."}]}, config)
    print("asked:", state["__interrupt__"][0].value["question"])
    state = agent.invoke(Command(resume=answer), config)
    print("told:", state["messages"][-1].content)
