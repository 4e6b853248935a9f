"""A supervisor whose tools ask two other agents at once, and then a graph of one node."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent

model = ChatOpenAI(model="gpt-4.1-mini")


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


math_expert = create_react_agent(model, [add], prompt="You are a mathematician.", name="math_expert")
poet = create_react_agent(model, [], prompt="You are a poet.", name="poet")


def translate(state: MessagesState) -> dict:
    return {"messages": [model.invoke([("system", "Translate to French."), *state["messages"]])]}


translation = StateGraph(MessagesState)
translation.add_node("translator", translate)
translation.set_entry_point("translator")
translation = translation.compile()


@tool
def ask_math_expert(question: str) -> str:
    """Ask the mathematician."""
    return math_expert.invoke({"messages": [("user", question)]})["messages"][-1].content


@tool
def ask_poet(question: str) -> str:
    """Ask the poet."""
    return poet.invoke({"messages": [("user", question)]})["messages"][-1].content


@tool
def to_french(text: str) -> str:
    """Translate a text to French."""
    return translation.invoke({"messages": [("user", text)]})["messages"][-1].content


supervisor = create_react_agent(
    model, [ask_math_expert, ask_poet, to_french], prompt="You supervise.", name="supervisor"
)
for message in supervisor.invoke({"messages": [("user", "Sing of 2 + 3, in French.")]})["messages"]:
    print(f"{message.type}: {message.content}")
