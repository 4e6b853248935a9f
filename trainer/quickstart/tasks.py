"""Arithmetic questions for a tool-using agent; an operand pair is either a training pair or a held-out one, always."""

from __future__ import annotations

import json
import operator
import random
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from agl.errors import ConfigError, DatasetError

Split = Literal["train", "heldout"]
Task = dict[str, str]

OPERATORS = ("+", "-", "*", "/")
HELDOUT_SHARE = 1 / 8

_EXPRESSION = re.compile(r"\s{0,8}(-?[0-9]{1,18})\s{0,8}([-+*/])\s{0,8}(-?[0-9]{1,18})\s{0,8}")
_ANNOTATION = re.compile(r"<<\s*(\d+)\s*([-+*/])\s*(\d+)\s*=\s*(\d+)\s*>>")
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
    left, op, right = int(match[1]), match[2], int(match[3])
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
            a, b = _number(rng, 4), _number(rng, 4)
        elif op == "*":
            a, b = _number(rng, 4), _number(rng, 2)
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
    _check_split(split)
    rng = random.Random(f"{split} {seed}")
    tasks: dict[str, Task] = {}
    while len(tasks) < n:
        task = make_task(*random_problem(rng, split))
        tasks.setdefault(task["question"], task)
    return list(tasks.values())


def gsm8k_tasks(path: str | Path, *, split: Split, max_digits: int = 4) -> list[Task]:
    """The single-step integer calculations in GSM8K's `<<48/2=24>>` annotations, in order, each once.

    Args:
        path: a GSM8K `.jsonl` file, or the folder that holds `train.jsonl` and `test.jsonl`.
        split: ours, by `split_of`, so that held-out tasks stay disjoint from every training task of this module.
        max_digits: leave out calculations with a longer operand; the tiny policy has seen up to 4 digits.

    Raises:
        ConfigError: a split that does not exist.
        DatasetError: no such file, a line that is not GSM8K, or no calculation of that kind.
    """
    _check_split(split)
    root = Path(path)
    files = [root / "train.jsonl", root / "test.jsonl"] if root.is_dir() else [root]
    tasks: dict[str, Task] = {}
    for file in files:
        for a, op, b, result in _annotations(file):
            exact = calculate(f"{a} {op} {b}") == str(result)
            if exact and max(a, b) < 10**max_digits and split_of(a, b) == split:
                task = make_task(a, op, b)
                tasks.setdefault(task["question"], task)
    if not tasks:
        raise DatasetError("no integer calculation of one step found", hint="is this GSM8K?", path=root, split=split)
    return list(tasks.values())


def _annotations(file: Path) -> Iterable[tuple[int, str, int, int]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DatasetError(
            f"cannot read GSM8K: {error.strerror}", hint="name its folder or one of its .jsonl files", path=file
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            answer = json.loads(line)["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                "not a GSM8K line", hint='each line is {"question": ..., "answer": ...}', path=file, line=number
            ) from error
        for a, op, b, result in _ANNOTATION.findall(answer):
            yield int(a), op, int(b), int(result)


def write_jsonl(path: str | Path, tasks: Iterable[Mapping[str, Any]]) -> None:
    """Write one task per line; missing folders are made."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks), encoding="utf-8")


def _check_split(split: str) -> None:
    if split not in ("train", "heldout"):
        raise ConfigError(f"there is no split {split!r}", hint="known: heldout, train")
