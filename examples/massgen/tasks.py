"""Questions about a list, generated: which amount of an item it names. A held-out item and amount are never trained."""

from __future__ import annotations

import random
import re
import zlib
from typing import Literal

ITEMS = ("pens", "mugs", "lamps", "rugs", "bowls", "chairs", "clocks", "vases")


def make_tasks(n: int, *, seed: int, split: Literal["train", "held_out"]) -> list[dict[str, str]]:
    """`n` tasks with `question` and `answer`, all different within a split where there are enough."""
    rng = random.Random(f"{seed} {split}")
    tasks: dict[str, dict[str, str]] = {}
    while len(tasks) < n:
        amounts = dict(zip(rng.sample(ITEMS, 3), rng.sample(range(1, 10), 3), strict=True))
        item = rng.choice(list(amounts))
        held_out = zlib.crc32(f"{item} {amounts[item]}".encode()) % 6 == 0
        if held_out == (split == "held_out"):
            listed = ", ".join(f"{name} {amount}" for name, amount in amounts.items())
            question = f"Stock: {listed}. How many {item}?"
            tasks[question] = {"question": question, "answer": str(amounts[item])}
    return list(tasks.values())


def right_answer(text: str) -> str:
    """The answer to a question, from its text."""
    item = re.search(r"How many (\w+)\?", text)
    amount = re.search(rf"\b{item[1]} (\d+)", text) if item is not None else None
    return amount[1] if amount is not None else ""
