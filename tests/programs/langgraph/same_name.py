"""Agents that share a name: two graphs have a node "assistant", and an agent of that name is used in two nodes."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

model = ChatOpenAI(model="gpt-4.1-mini")
editor = create_agent(model, [], system_prompt="You edit.", name="editor")


def ask(prompt: str):
    def assistant(state: MessagesState) -> dict:
        return {"messages": [model.invoke([("system", prompt), *state["messages"]])]}

    return assistant


def line(*nodes: tuple[str, object]) -> StateGraph:
    graph = StateGraph(MessagesState)
    graph.add_sequence(list(nodes))
    graph.add_edge(START, nodes[0][0])
    return graph


inner = line(("assistant", ask("You check.")), ("polish", editor)).compile()
app = line(("assistant", ask("You draft.")), ("assess", inner), ("shorten", editor)).compile()

for message in app.invoke({"messages": [("user", "Write about the sea.")]})["messages"]:
    print(f"{message.type}: {message.content}")
