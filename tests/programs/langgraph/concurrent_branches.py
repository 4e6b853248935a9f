"""Branches of an async graph that run at once, with a critic of each, and a node that waits for all of them."""

import asyncio
import operator
from typing import Annotated, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from opentelemetry import trace

model = ChatOpenAI(model="gpt-4.1-mini")
tracer = trace.get_tracer("review")


class State(TypedDict):
    code: str
    reviews: Annotated[list[str], operator.add]
    verdict: str


def reviewer(aspect: str):
    async def review(state: State) -> dict:
        with tracer.start_as_current_span(f"review {aspect}"):
            draft = await model.ainvoke([("system", f"Review the {aspect} of code."), ("user", state["code"])])
        return {"reviews": [f"{aspect}: {draft.text}"]}

    return review


async def judge(state: State) -> dict:
    words = []
    async for chunk in model.astream(
        [("system", "Sum the reviews up."), ("user", "\n".join(sorted(state["reviews"])))]
    ):
        words.append(chunk.text)
    return {"verdict": "".join(words)}


graph = StateGraph(State)
graph.add_node("judge", judge, defer=True)
for aspect in ("security", "speed", "style"):
    graph.add_node(f"{aspect}_reviewer", reviewer(aspect))
    graph.add_edge(START, f"{aspect}_reviewer")
    graph.add_edge(f"{aspect}_reviewer", "judge")
graph.add_edge("judge", END)
app = graph.compile()


async def main() -> None:
    states = await asyncio.gather(*(app.ainvoke({"code": code}) for code in ("print(1)", "eval(x)")))
    for state in states:
        print(sorted(state["reviews"]), state["verdict"])


asyncio.run(main())
