"""Plan and execute: a planner, an agent that does each step, and a replanner; one thread over two questions."""

import operator
from typing import Annotated, TypedDict

from langchain.agents import create_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

model = ChatOpenAI(model="gpt-4.1-mini", temperature=0)


class PlanExecute(TypedDict):
    input: str
    plan: list[str]
    past_steps: Annotated[list[tuple[str, str]], operator.add]
    response: str


class Plan(BaseModel):
    """Steps to follow, in order."""

    steps: list[str]


class Act(BaseModel):
    """What to do next: steps that remain, or the answer."""

    response: str = ""
    steps: list[str] = []


@tool
def population(country: str) -> int:
    """The population of a country."""
    return {"France": 68_000_000, "Spain": 49_000_000}[country]


agent_executor = create_agent(model, [population], system_prompt="Do the step that you are given.")
planner = ChatPromptTemplate.from_messages(
    [("system", "Make a plan, step by step."), ("user", "{input}")]
) | model.with_structured_output(Plan)
replanner = ChatPromptTemplate.from_template(
    "Update the plan.\nObjective: {input}\nPlan: {plan}\nDone: {past_steps}"
) | model.with_structured_output(Act)


def plan_step(state: PlanExecute) -> dict:
    return {"plan": planner.invoke({"input": state["input"]}).steps, "response": ""}


def execute_step(state: PlanExecute) -> dict:
    step = state["plan"][0]
    answer = agent_executor.invoke({"messages": [("user", step)]})
    return {"past_steps": [(step, answer["messages"][-1].content)]}


def replan_step(state: PlanExecute) -> dict:
    act = replanner.invoke(state)
    return {"response": act.response} if act.response else {"plan": act.steps}


workflow = StateGraph(PlanExecute)
workflow.add_node("planner", plan_step)
workflow.add_node("agent", execute_step)
workflow.add_node("replan", replan_step)
workflow.add_edge(START, "planner")
workflow.add_edge("planner", "agent")
workflow.add_edge("agent", "replan")
workflow.add_conditional_edges("replan", lambda state: END if state["response"] else "agent", ["agent", END])
app = workflow.compile(checkpointer=InMemorySaver())

config = {"configurable": {"thread_id": "demography"}}
for question in ("Do more people live in France or in Spain?", "And how many live in France?"):
    state = app.invoke({"input": question}, config)
    print(state["response"], "after", len(state["past_steps"]), "steps")
