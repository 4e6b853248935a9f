"""Map-reduce: a joke for each subject at once, by `Send`, and the best of them by structured output."""

import operator
from typing import Annotated, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from pydantic import BaseModel, Field

model = ChatOpenAI(model="gpt-4.1-mini", temperature=0)


class Subjects(BaseModel):
    """Subjects to joke about."""

    subjects: list[str]


class BestJoke(BaseModel):
    """The best joke."""

    id: int = Field(description="Index of the best joke, starting with 0")


class OverallState(TypedDict):
    topic: str
    subjects: list[str]
    jokes: Annotated[list[str], operator.add]
    best: str


class JokeState(TypedDict):
    subject: str


def generate_topics(state: OverallState) -> dict:
    answer = model.with_structured_output(Subjects).invoke(f"List three examples of: {state['topic']}.")
    return {"subjects": answer.subjects}


def generate_joke(state: JokeState) -> dict:
    return {"jokes": [model.invoke(f"Tell a joke about {state['subject']}.").content]}


def continue_to_jokes(state: OverallState) -> list[Send]:
    return [Send("generate_joke", {"subject": subject}) for subject in state["subjects"]]


def best_joke(state: OverallState) -> dict:
    judge = model.with_structured_output(BestJoke, method="function_calling")
    answer = judge.invoke(f"Which joke is best?\n{'; '.join(state['jokes'])}")
    return {"best": state["jokes"][answer.id]}


graph = StateGraph(OverallState)
graph.add_node("generate_topics", generate_topics)
graph.add_node("generate_joke", generate_joke)
graph.add_node("best_joke", best_joke)
graph.add_edge(START, "generate_topics")
graph.add_conditional_edges("generate_topics", continue_to_jokes, ["generate_joke"])
graph.add_edge("generate_joke", "best_joke")
graph.add_edge("best_joke", END)
app = graph.compile(name="jokes")

result = app.invoke({"topic": "animals"})
for joke in result["jokes"]:
    print("*" if joke == result["best"] else "-", joke)
