"""Teams as subgraphs of a graph, whose updates and whose models' tokens are streamed with where they are from."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

model = ChatOpenAI(model="gpt-4.1-mini")


@tool
def search(query: str) -> str:
    """Search the web."""
    return f"{query}: bees dance"


def searcher(state: MessagesState) -> dict:
    return {"messages": [model.bind_tools([search]).invoke([("system", "You search."), *state["messages"]])]}


def fact_checker(state: MessagesState) -> dict:
    return {"messages": [model.invoke([("system", "You check facts."), *state["messages"]])]}


def author(state: MessagesState) -> dict:
    return {"messages": [model.invoke([("system", "You write."), *state["messages"]])]}


research = StateGraph(MessagesState)
research.add_node(searcher)
research.add_node("tools", ToolNode([search]))
research.add_node(fact_checker)
research.add_edge(START, "searcher")
research.add_conditional_edges("searcher", tools_condition, {"tools": "tools", "__end__": "fact_checker"})
research.add_edge("tools", "searcher")

company = StateGraph(MessagesState)
company.add_node("research_team", research.compile(name="research_team"))
company.add_node(author)
company.add_edge(START, "research_team")
company.add_edge("research_team", "author")
app = company.compile()

tokens: dict[str, list[str]] = {}
for namespace, mode, chunk in app.stream(
    {"messages": [{"role": "user", "content": "How do bees talk?"}]},
    stream_mode=["updates", "messages"],
    subgraphs=True,
):
    where = " > ".join(part.partition(":")[0] for part in namespace)
    if mode == "updates":
        print(f"[{where}] {', '.join(chunk)}")
    else:
        message, metadata = chunk
        tokens.setdefault(metadata["langgraph_node"], []).append(message.text)
for node, parts in tokens.items():
    print(node, parts)
