"""Tickets of a help desk, the rules of the house, and how an answer is graded by them."""

from __future__ import annotations

import random
import re
from typing import Any

PROBLEMS = {
    "technical": ("the page stays white", "the export has no rows", "the app closes by itself", "the login fails"),
    "billing": ("the invoice has a wrong name", "a receipt is missing", "the card was declined", "the tax is wrong"),
}
MONEY = ("", "", " I want my money back.")
WHO = ("For me", "For me", "For our whole team")


def tickets(n: int, *, seed: int, split: str) -> list[dict[str, Any]]:
    """`n` tickets with what the house wants: a ticket about money goes to billing, whatever is broken, and one of a
    whole team is urgent. Ticket numbers of the splits differ: "train" even, "val" 4k + 1, "held out" 4k + 3."""
    rng = random.Random(f"{split} {seed}")
    offset, step = {"train": (0, 2), "val": (1, 4), "held out": (3, 4)}[split]
    tasks = []
    for number in rng.sample(range(1000 + offset, 9000, step), n):
        topic = rng.choice(list(PROBLEMS))
        problem, money, who = rng.choice(PROBLEMS[topic]), rng.choice(MONEY), rng.choice(WHO)
        tasks.append(
            {
                "ticket": f"Ticket {number}: {who} {problem}.{money}",
                "number": str(number),
                "queue": "billing" if money else topic,
                "urgency": "urgent" if "team" in who else "normal",
            }
        )
    return tasks


def grade(task: dict[str, Any], output: Any) -> dict[str, float]:
    """`reward`, the share of the house's rules that were kept, and each rule by name, for whoever rewrites a prompt."""
    said, answer = str(output["sorted"]).lower(), str(output["answer"])
    rules = {
        "money_goes_to_billing": float(said.split(" ")[0] == task["queue"]),
        "a_team_is_urgent": float(said.split(" ")[-1] == task["urgency"]),
        "names_the_ticket": float(task["number"] in answer),
        "promises_no_day": float(not re.search(r"\b(today|tomorrow|monday)\b", answer.lower())),
    }
    return {"reward": sum(rules.values()) / len(rules), **rules}
