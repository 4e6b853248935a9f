"""A LangGraph graph of the user's own: a node that asks a model, and a node that runs its tools."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model="m").bind_tools([add])
graph = StateGraph(MessagesState)
graph.add_node("solver", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "solver")
graph.add_conditional_edges("solver", tools_condition)
graph.add_edge("tools", "solver")
result = graph.compile().invoke({"messages": [{"role": "user", "content": "What is 2 + 3?"}]})
print(result["messages"][-1].content)
