"""What customers say, and what is asked about them later: shops with tastes, which are drawn anew for each seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

DRINKS = ("tea", "milk", "water", "cocoa", "juice", "coffee", "cider", "lemonade")
CHANCE = 1 / len(DRINKS)
"""How often the right drink is guessed."""
FAVOURITE = 0.6
"""The share of a shop's customers who prefer its favourite; as many prefer one as another of the other drinks."""
NOTED = "Noted."
QUESTIONS = ("What does customer {name} prefer?", "Customer {name} is here. What do we serve?")


@dataclass(frozen=True, slots=True)
class Shop:
    """A shop and its customers.

    Attributes:
        name: separates its entries in the memory. favourite: the drink that most customers prefer.
        drinks: customer -> preferred drink.
    """

    name: str
    favourite: str
    drinks: dict[str, str]

    @property
    def statements(self) -> list[dict[str, Any]]:
        """One task for each customer, who says what they prefer."""
        return [self._task(fact(*pair), NOTED) for pair in self.drinks.items()]

    def questions(self, wording: int = 0) -> list[dict[str, Any]]:
        """One task for each customer, about whom is asked what nothing in the question tells."""
        return [self._task(QUESTIONS[wording].format(name=name), drink) for name, drink in self.drinks.items()]

    def _task(self, question: str, answer: str) -> dict[str, Any]:
        return {"shop": self.name, "question": question, "answer": answer}


@dataclass(frozen=True, slots=True)
class Shops:
    """Three shops without a customer in common.

    Attributes:
        train: asked about in training. held_out: asked about in the evaluation; its favourite is another one.
        beginner: where the tiny policy was a beginner; all drinks are preferred alike there.
    """

    train: Shop
    held_out: Shop
    beginner: Shop


def shops(seed: int, train: int = 160, held_out: int = 192, beginner: int = 540) -> Shops:
    """The shops with these numbers of customers, at most 900 in all."""
    rng = random.Random(f"memory/{seed}")
    numbers = iter(rng.sample(range(100, 1000), train + held_out + beginner))

    def shop(name: str, size: int, favourite: str, share: float) -> Shop:
        others = [drink for drink in DRINKS if drink != favourite]
        rest = size - round(share * size)
        drinks = [favourite] * (size - rest) + [others[i % len(others)] for i in range(rest)]
        rng.shuffle(drinks)
        return Shop(name, favourite, {f"C-{next(numbers)}": drink for drink in drinks})

    here, there, elsewhere = rng.sample(DRINKS, 3)
    return Shops(
        shop("train", train, here, FAVOURITE),
        shop("held out", held_out, there, FAVOURITE),
        shop("beginner", beginner, elsewhere, CHANCE),
    )


def fact(name: str, drink: str) -> str:
    """What a customer tells."""
    return f"Customer {name} prefers {drink}."


def reward(task: dict[str, Any], output: Any) -> float:
    """1 for the exact answer."""
    return float(str(output).strip() == task["answer"])
