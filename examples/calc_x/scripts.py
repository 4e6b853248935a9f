"""Scripted models: one that solves every generated problem, and one that knows the form and mostly errs."""

from __future__ import annotations

import random
from typing import Any

from agl.testing.provider import Reply
from examples.calc_x.tasks import understood

MISTAKES = {
    "none": 0.22,
    "guess": 0.30,
    "early": 0.14,
    "operator": 0.16,
    "operand": 0.08,
    "expression": 0.05,
    "format": 0.05,
}
"""How often the beginner makes each: no call at all, the last call left out, a wrong operator, a number of the question
in place of the result so far, an expression that the calculator refuses, an answer without "###"."""

CONFUSED = {"+": "-", "-": "+", "*": "/", "/": "*"}


def oracle(body: dict[str, Any]) -> Reply:
    """Does one step after another, each on the result of the one before."""
    question, results = _conversation(body)
    problem = understood(question)
    if problem is None:
        return Reply("### 0")
    start, steps = problem
    value = results[-1] if results else str(start)
    if len(results) == len(steps):
        return Reply(f"### {value}")
    symbol, n = steps[len(results)]
    return _call(f"{value} {symbol} {n}")


def beginner(body: dict[str, Any]) -> Reply:
    """The oracle with a mistake, the same one whenever it meets the same question."""
    question, results = _conversation(body)
    rng = random.Random(question)
    mistake = rng.choices(list(MISTAKES), list(MISTAKES.values()))[0]
    problem = understood(question)
    assert problem is not None
    start, steps = problem
    numbers = [start, *(n for _, n in steps)]
    wrong_step = rng.randrange(len(steps))
    value, k = results[-1] if results else str(start), len(results)
    if value.startswith("error"):
        return Reply(f"### {numbers[-1]}")
    match mistake:
        case "guess":
            return Reply(f"### {numbers[-1]}")
        case "early" if k == len(steps) - 1:
            return Reply(f"### {value}")
        case "format" if k == len(steps):
            return Reply(value)
        case "operator" if k == wrong_step:
            symbol, n = steps[k]
            return _call(f"{value} {CONFUSED[symbol]} {n}")
        case "operand" if k == wrong_step:
            symbol, n = steps[k]
            return _call(f"{start if k else n} {symbol} {n}")
        case "expression" if k == wrong_step:
            return _call(f"{value} {steps[k][1]}")
        case _:
            return oracle(body)


def _call(expression: str) -> Reply:
    return Reply(tools=(("calculator", {"expression": expression}),))


def _conversation(body: dict[str, Any]) -> tuple[str, list[str]]:
    """The question, and the calculator's results so far."""
    question = next(_text(m["content"]) for m in body["messages"] if m["role"] == "user")
    return question, [_text(m["content"]) for m in body["messages"] if m["role"] == "tool"]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
