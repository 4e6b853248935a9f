"""Players that a server answers for: one that plays an equilibrium, and one that knows how to say what it does."""

from __future__ import annotations

import random
import re
from typing import Any

from agl.testing.provider import Reply, Script, last_said
from examples.games.kuhn.rules import CARDS, SITUATIONS, Situation, equilibrium


def situation(body: dict[str, Any]) -> Situation:
    """What the player knows, read from its question."""
    text = last_said(body)[1]
    card = re.search(rf"card: ([{CARDS}])", text)
    assert card is not None, text
    return card[1], tuple(re.findall(r"pass|bet", text.partition("So far:")[2]))


def oracle(seed: int = 0, alpha: float = 0.2) -> Script:
    """Plays an equilibrium, which nobody wins against on average."""
    rng, strategy = random.Random(seed), equilibrium(alpha)
    return lambda body: Reply("bet" if rng.random() < strategy[situation(body)] else "pass")


def beginner() -> Script:
    """Knows the words and takes the cards the wrong way round: bets with the jack, passes with the king, and with the
    queen does either. It loses 7/6 a game to one who knows it."""
    dice = {known: random.Random(str(known)) for known in SITUATIONS}

    def script(body: dict[str, Any]) -> Reply:
        known = situation(body)
        return Reply({"J": "bet", "Q": dice[known].choice(("bet", "pass")), "K": "pass"}[known[0]])

    return script
