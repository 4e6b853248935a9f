"""Environments of `verifiers` of its three kinds, and two that break; loaded by name as any other."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

SUMS = [{"question": f"What is {a} + {a + 7}?", "answer": str(2 * a + 7)} for a in range(11, 23)]


async def right(completion: Any, answer: str) -> float:
    """1 for the right number at the end, by int(): a text without one makes it raise."""
    return float(int(completion[-1]["content"].split()[-1]) == int(answer))


def unreachable(completion: Any) -> float:
    """A grader whose server is gone."""
    raise ConnectionError("the grader's database is gone")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


class Guessing(vf.MultiTurnEnv):
    """The policy guesses the answer; it learns whether that is too low or too high."""

    def __init__(self, broken: bool = False, **options: Any) -> None:
        super().__init__(max_turns=9, **options)
        self.broken = broken

    @vf.stop
    async def guessed(self, state: Any) -> bool:
        last = state["trajectory"][-1]["completion"][-1].content if state["trajectory"] else ""
        return bool(last) and last.strip() == state["answer"]

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        if self.broken:
            raise ValueError("the game's file is damaged")
        guess = messages[-1].content.strip()
        if not guess.isdigit():
            return [{"role": "user", "content": "that is no number"}]
        return [{"role": "user", "content": "too low" if int(guess) < int(state["answer"]) else "too high"}]


def load_environment(kind: str = "single", broken: str = "") -> vf.Environment:
    """kind: "single", "multi" or "tool". broken: "grader" or "game"."""
    rubric = vf.Rubric(funcs=[unreachable if broken == "grader" else right])
    options: dict[str, Any] = {"dataset": Dataset.from_list(SUMS), "rubric": rubric}
    if kind == "single":
        return vf.SingleTurnEnv(system_prompt="Answer with the number.", **options)
    if kind == "multi":
        return Guessing(broken=broken == "game", **options)
    return vf.ToolEnv(tools=[add], **options)
