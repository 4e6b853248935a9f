"""Tasks of `inspect-ai`: a question, a question with a tool, and one whose scorer breaks."""

from __future__ import annotations

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser
from inspect_ai.scorer import Score, Target, accuracy, includes, match, scorer
from inspect_ai.solver import TaskState, generate, system_message, use_tools
from inspect_ai.tool import tool

SAMPLES = [
    Sample(id=f"sum-{a}", input=f"What is {a} + {a + 7}?", target=str(2 * a + 7), metadata={"a": a, "b": a + 7})
    for a in range(11, 23)
]


@tool
def add() -> Any:
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number.
            b: the other.
        """
        return a + b

    return execute


@scorer(metrics=[accuracy()])
def unreachable() -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        raise ConnectionError("the grader's database is gone")

    return score


@task
def sums() -> Task:
    solver = [system_message("Answer with the number."), generate()]
    return Task(dataset=MemoryDataset(SAMPLES), solver=solver, scorer=match(numeric=True))


@task
def tools() -> Task:
    samples = [s.model_copy(update={"input": [ChatMessageUser(content=str(s.input))]}) for s in SAMPLES]
    return Task(dataset=MemoryDataset(samples), solver=[use_tools(add()), generate()], scorer=includes())


@task
def broken() -> Task:
    return Task(dataset=MemoryDataset(SAMPLES), solver=generate(), scorer=unreachable())
