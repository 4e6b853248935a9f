"""What customers say, and what is asked about them later: facts that are drawn anew for each seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

DRINKS = ("tea", "milk", "water", "cocoa", "juice", "coffee", "cider", "lemonade")
CHANCE = 1 / len(DRINKS)
"""How often the right drink is guessed."""
NOTED = "Noted."
QUESTIONS = ("What does customer {name} prefer?", "Customer {name} is here. What do we serve?")


@dataclass(frozen=True, slots=True)
class Shop:
    """Customers and what they prefer.

    Attributes:
        known: customer -> drink, of those that are asked about in training. held_out: of others.
        before: of customers of another shop, from whom nothing that is asked here can be known.
    """

    known: dict[str, str]
    held_out: dict[str, str]
    before: dict[str, str]

    @property
    def statements(self) -> list[dict[str, Any]]:
        """One task for each customer who says what they prefer."""
        return [said(name, drink) for name, drink in (self.known | self.held_out).items()]

    @property
    def train(self) -> list[dict[str, Any]]:
        """Questions about the customers of `known`."""
        return [asked(name, drink) for name, drink in self.known.items()]

    @property
    def test(self) -> list[dict[str, Any]]:
        """Questions about those of `held_out`, which no policy was trained on."""
        return [asked(name, drink) for name, drink in self.held_out.items()]


def shop(seed: int, known: int = 160, held_out: int = 128, before: int = 600) -> Shop:
    """A shop whose customers have numbers and tastes of their own. At most 900 customers in all."""
    rng = random.Random(f"memory/{seed}")
    names = [f"C-{number}" for number in rng.sample(range(100, 1000), known + held_out + before)]
    drinks = {name: rng.choice(DRINKS) for name in names}

    def those(begin: int, end: int) -> dict[str, str]:
        return {name: drinks[name] for name in names[begin:end]}

    return Shop(those(0, known), those(known, known + held_out), those(known + held_out, len(names)))


def fact(name: str, drink: str) -> str:
    """What a customer tells."""
    return f"Customer {name} prefers {drink}."


def said(name: str, drink: str) -> dict[str, Any]:
    """The task of a customer who tells what they prefer."""
    return {"question": fact(name, drink), "answer": NOTED}


def asked(name: str, drink: str, wording: int = 0) -> dict[str, Any]:
    """The task of a question that nothing in it answers."""
    return {"question": QUESTIONS[wording].format(name=name), "answer": drink}


def reward(task: dict[str, Any], output: Any) -> float:
    """1 for the exact answer."""
    return float(str(output).strip() == task["answer"])
