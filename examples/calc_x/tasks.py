"""The problems: Calc-X's own rows, a generated small form of them, and the reward."""

from __future__ import annotations

import json
import math
import operator
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from agl.errors import DatasetError
from agl.rewards import MathAnswer

Task = dict[str, str]
"""A record of Calc-X: `id, question, chain, result, source`."""

FIELDS = ("id", "question", "chain", "result", "source")

# -- the reward --------------------------------------------------------------------------------------------------------

ANSWER = re.compile(r"###\s*(.+)")
REL_TOL = 1e-2
"""That of the program which the published figure is of."""

_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,30}|/\d{0,30}[1-9]\d{0,30})?")
_same_maths = MathAnswer(answer="result", output=ANSWER)


async def reward(task: Mapping[str, str], output: object) -> float:
    """1 if the text after the last "###" is the task's result, else 0: numbers to a hundredth, the rest as mathematics.

    Raises:
        RewardError: the task's result is no mathematics.
    """
    answers = ANSWER.findall(str(output))
    answer, result = number(answers[-1]) if answers else None, number(task["result"])
    if answer is not None and result is not None:
        return float(math.isclose(answer, result, rel_tol=REL_TOL))
    return await _same_maths.call_async(task, output)


def number(text: str) -> Fraction | None:
    """The number in a text such as "4.0", "1_050", "1,050", "2/3 = around 0.67" or "$12."; None for other texts."""
    plain = re.sub(r"(?<=\d)[_,](?=\d{3})", "", text.partition("= around")[0]).strip(" $.*#`")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


# -- Calc-X's rows -----------------------------------------------------------------------------------------------------


def load(file: Path) -> list[Task]:
    """The rows of a JSONL file of Calc-X.

    Raises:
        DatasetError: there is no such file, or a line is no record of Calc-X.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DatasetError(
            f"cannot read Calc-X: {error.strerror}", hint="--data names a folder with train.jsonl and test.jsonl",
            path=file,
        ) from error  # fmt: skip
    tasks: list[Task] = []
    for i, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            tasks.append({field: str(row[field]) for field in FIELDS})
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                "no record of Calc-X", hint=f"each line is an object with {', '.join(FIELDS)}", path=file, line=i
            ) from error
    return tasks


# -- the generated form ------------------------------------------------------------------------------------------------

NAMES = ("Ana", "Ben", "Chen", "Dana")
THINGS = ("pens", "eggs", "cards", "coins")
OPENING = "{name} has {n} {things}."
ENDING = "How many {things} now?"
STEPS = {
    "+": ("Then {n} more come.", "{name} buys {n}."),
    "-": ("{name} sells {n}.", "{n} get lost."),
    "*": ("Soon there are {n} times as many.", "The number grows by a factor of {n}."),
    "/": ("{n} children share them.", "One of {n} equal parts stays."),
}
LENGTHS = (0.5, 0.35, 0.15)

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv,
}  # fmt: skip
LARGEST = 999
HELD_OUT = 1 / 8

Step = tuple[str, int]
"""An operator, and the number that it takes next to the result so far."""


def generated(n: int, *, seed: int, held_out: bool = False, lengths: Sequence[float] = LENGTHS) -> list[Task]:
    """`n` different problems of one to three steps, in each of which a step's result goes into the next.

    Whether a problem is held out is decided by its numbers, so that none of training has those of a held-out one.

    Args:
        lengths: the shares of problems of one, two and three steps.
    """
    rng = random.Random(f"{seed} {held_out}")
    tasks: dict[str, Task] = {}
    while len(tasks) < n:
        start, steps = _problem(rng, lengths)
        if _is_held_out(start, steps) == held_out:
            task = _record(rng, f"generated__{seed}_{len(tasks)}", start, steps)
            tasks.setdefault(task["question"], task)
    return list(tasks.values())


def _problem(rng: random.Random, lengths: Sequence[float]) -> tuple[int, list[Step]]:
    value = start = rng.randint(10, 99)
    steps: list[Step] = []
    for _ in range(rng.choices((1, 2, 3), lengths)[0]):
        divisors = [d for d in range(2, 10) if value % d == 0]
        impossible = {"*" if value > LARGEST // 9 else "", "" if divisors else "/"}
        symbol = rng.choice([symbol for symbol in OPERATIONS if symbol not in impossible])
        match symbol:
            case "+":
                n = rng.randint(2, 99)
            case "-":
                n = rng.randint(1, min(value, 99))
            case "*":
                n = rng.randint(2, 9)
            case _:
                n = rng.choice(divisors)
        steps.append((symbol, n))
        value = OPERATIONS[symbol](value, n)
        if value < 2:
            break
    return start, steps


def _is_held_out(start: int, steps: list[Step]) -> bool:
    return zlib.crc32(" ".join(str(n) for n in (start, *(n for _, n in steps))).encode()) < HELD_OUT * 2**32


def _record(rng: random.Random, name: str, start: int, steps: list[Step]) -> Task:
    words = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    said = [OPENING.format(n=start, **words)]
    chain: list[str] = []
    value = start
    for symbol, n in steps:
        said.append(rng.choice(STEPS[symbol]).format(n=n, **words))
        expression, value = f"{value} {symbol} {n}", OPERATIONS[symbol](value, n)
        chain.append(f'<gadget id="calculator">{expression}</gadget>\n<output>{value}</output>')
    said.append(ENDING.format(**words))
    return {
        "id": name,
        "question": " ".join(said),
        "chain": "\n\n".join([*chain, f"<result>{value}</result>"]),
        "result": str(value),
        "source": "generated",
    }


def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(
        re.escape(sentence).replace(r"\{n\}", r"(\d+)").replace(r"\{name\}", r"\w+").replace(r"\{things\}", r"\w+")
    )


_OPENING = _pattern(OPENING)
_STEPS = [(symbol, _pattern(sentence)) for symbol, sentences in STEPS.items() for sentence in sentences]


def understood(question: str) -> tuple[int, list[Step]] | None:
    """The first number and the steps of a generated question; None for any other text."""
    sentences = re.split(r"(?<=[.?]) ", question)
    start = _OPENING.fullmatch(sentences[0])
    steps = [(s, int(m[1])) for text in sentences for s, p in _STEPS if (m := p.fullmatch(text))]
    return (int(start[1]), steps) if start and len(steps) == len(sentences) - 2 else None
