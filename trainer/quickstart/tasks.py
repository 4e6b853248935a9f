"""Arithmetic questions for a tool-using agent; an operand pair is either a training pair or a held-out one, always."""

from __future__ import annotations

import operator
import random
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from agl.errors import ConfigError

Split = Literal["train", "heldout"]
Task = dict[str, str]

OPERATORS = ("+", "-", "*", "/")
HELDOUT_SHARE = 1 / 8

_EXPRESSION = re.compile(r"\s{0,8}(-?[0-9]{1,18})\s{0,8}([-+*/])\s{0,8}(-?[0-9]{1,18})\s{0,8}")
_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


def calculate(expression: str) -> str:
    """The value of `a op b`, two integers and one of + - * /, as text; "error: ..." for anything else.

    A division that leaves a remainder is an error too: every answer is an integer.
    """
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return "error: bad expression"
    left = int(match[1])
    op = match[2]
    right = int(match[3])
    if op == "/" and (right == 0 or left % right):
        return "error: not an integer"
    return str(_FUNCTIONS[op](left, right))


def exact_answer(task: Mapping[str, Any], output: object) -> float:
    """1.0 iff the agent's final text is the task's answer, else 0.0."""
    return float(isinstance(output, str) and output.strip() == task["answer"])


def make_task(a: int, op: str, b: int) -> Task:
    """`{"question": "What is 47 * 36?", "answer": "1692"}`."""
    return {"question": f"What is {a} {op} {b}?", "answer": calculate(f"{a} {op} {b}")}


def split_of(a: int, b: int) -> Split:
    """The split of an operand pair, with any operator: a hash decides, `HELDOUT_SHARE` are held out."""
    return "heldout" if zlib.crc32(f"{a} {b}".encode()) < HELDOUT_SHARE * 2**32 else "train"


def random_problem(rng: random.Random, split: Split) -> tuple[int, str, int]:
    """`(a, op, b)` of the split, of the sizes that grade-school word problems have: operands of 1 to 4 digits."""
    while True:
        op = rng.choice(OPERATORS)
        if op in "+-":
            a = _number(rng, 4)
            b = _number(rng, 4)
        elif op == "*":
            a = _number(rng, 4)
            b = _number(rng, 2)
        else:
            b = max(1, _number(rng, 2))
            a = b * _number(rng, 3)
        if a < 10_000 and split_of(a, b) == split:
            return a, op, b


def _number(rng: random.Random, max_digits: int) -> int:
    """A number of 1 to `max_digits` digits; two digits are the most likely, as in word problems."""
    digits = rng.choices(range(1, max_digits + 1), weights=(3, 8, 6, 3)[:max_digits])[0]
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def arithmetic_tasks(n: int, *, seed: int, split: Split) -> list[Task]:
    """`n` different tasks of the split, the same ones for the same seed.

    Raises:
        ConfigError: a split that does not exist.
    """
    if split not in ("train", "heldout"):
        raise ConfigError(f"there is no split {split!r}", hint="known: heldout, train")
    rng = random.Random(f"{split} {seed}")
    tasks: dict[str, Task] = {}
    while len(tasks) < n:
        task = make_task(*random_problem(rng, split))
        tasks.setdefault(task["question"], task)
    return list(tasks.values())
