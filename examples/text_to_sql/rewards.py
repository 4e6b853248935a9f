"""The rewards of each call of the text-to-SQL program, and the credit rule."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from agent import Node, State, approved, rows

import agl
from agl.rewards import SQLResult

RUNS, FAILS, NO_QUERY = 0.1, -0.1, -0.2
SHARED = 0.5
STATED_ROWS = 3

credit = agl.credit.PerCall(shared=SHARED)
"""A call's return: its own rewards, and half of `final_match`."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


# -- by rule: did the query run? --------------------------------------------------------------------------------------

rules = agl.AIR()


@rules.on_tool_success(tool="run_sql")
def query_runs() -> float:
    return RUNS


@rules.on_tool_failure(tool="run_sql")
def query_fails() -> float:
    return FAILS


@rules.on_call(agent=["writer", "rewriter"])
def no_query(transition: agl.Transition) -> float | None:
    """Less than a failed query: silence must not be the safer choice."""
    tools = {call["function"]["name"] for call in transition.call.response.get("tool_calls") or ()}
    return None if "run_sql" in tools else NO_QUERY


# -- by the references: was it right? ---------------------------------------------------------------------------------


class Earnings:
    """Grades turns and outcomes of the program.

    Args:
        tasks: the result of `databases.tasks`.
        databases: the folder of the SQLite files.
    """

    def __init__(self, tasks: Collection[Mapping[str, Any]], databases: Path) -> None:
        self._tasks = {task["id"]: task for task in tasks}
        self._match = SQLResult(f"{databases}/{{db}}.sqlite", answer="queries")

    async def final_match(self, task: Mapping[str, Any], output: Mapping[str, Any]) -> dict[str, float]:
        """The reward of the whole rollout: whether the last query gives the rows of a reference."""
        return {"final_match": await self._matches(task, output["query"])}

    async def turn(self, agent: str, before: State, update: Mapping[str, Any]) -> dict[str, float]:
        """The rewards of an agent's turn.

        Args:
            agent: its name. before: the state that it saw. update: what it changed in the state.
        """
        task = self._tasks[before["id"]]
        if agent == "checker":
            right = await self._matches(task, before["query"]) == 1.0
            return {"verdict_is_right": float(approved(update["verdict"]) == right)}
        if agent == "answerer":
            return {"answer_states_result": stated(update["answer"], rows(before))}
        return {"query_matches": await self._matches(task, update["query"])}

    def graded(self, agents: Mapping[str, Node], trained: Collection[str]) -> dict[str, Node]:
        """The agents' turns; those of trained agents emit their rewards, which go to the call just made.

        Only trained agents: a reward in the turn of any other agent would count for the whole rollout.
        """
        return {name: self._graded(name, node) if name in trained else node for name, node in agents.items()}

    def _graded(self, name: str, node: Node) -> Node:
        @functools.wraps(node)
        async def turn(state: State) -> dict[str, Any]:
            update = await node(state)
            agl.emit_reward(await self.turn(name, state, update))
            return update

        return turn

    async def _matches(self, task: Mapping[str, Any], query: str) -> float:
        return await self._match.call_async(task, query) if query else 0.0


def stated(answer: str, result: list[tuple[Any, ...]] | None) -> float:
    """The share of the first rows' values that an answer states; 1 where there is none to state."""
    cells = [cell for row in (result or ())[:STATED_ROWS] for cell in row if cell is not None]
    numbers = [float(n.replace(",", "")) for n in _NUMBER.findall(answer)]
    is_stated = [
        any(math.isclose(cell, n, rel_tol=5e-3, abs_tol=1e-9) for n in numbers)
        if isinstance(cell, int | float)
        else str(cell).lower() in answer.lower()
        for cell in cells
    ]
    return sum(is_stated) / len(is_stated) if is_stated else 1.0
