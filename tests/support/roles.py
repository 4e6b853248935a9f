"""Small roles for a tiny policy, and demonstrations of them: a writer, a checker who says what should have been
printed, a player of a game, and a clerk who needs four tool calls in a row before he can answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agl.trainer.quickstart.demos import Demo, Turn, call_of, opening, tool_result
from agl.trainer.quickstart.policy import Recipe, Stage, make_policy

WRITER, CHECKER, PLAYER, CLERK = "Write.", "Check.", "Play.", "Log in, fetch, open, read."
"""Their system prompts."""
CLERK_TOOLS = {"login": "token", "fetch": "file", "open": "page", "read": "line"}
"""What each gives: a word and a number. It takes the number of the user, or else the one that the tool before gave."""
REFUSED = "error: bad number"
GIVE_UP = "I do not know"
END = "<|im_end|>"

Share = float
"""How many of the demonstrations of a decision are good, 0 to 1."""


def two_digits(rng: random.Random) -> str:
    return str(rng.randrange(10, 100))


def misprint(number: str, rng: random.Random) -> str:
    """The number with one digit changed."""
    place = rng.randrange(2)
    digits = [d for d in "0123456789" if d != number[place] and (place or d != "0")]
    return number[:place] + rng.choice(digits) + number[place + 1 :]


def asked_to_write(number: str) -> str:
    return f"Write {number}."


def asked_to_check(number: str, text: str) -> str:
    return f"Asked {number}, got {text}."


def asked_to_play(limit: int) -> str:
    return f"Limit {limit}."


def asked_to_fetch(user: str) -> str:
    return f"User {user}."


# -- demonstrations ---------------------------------------------------------------------------------------------------


def writes(rng: random.Random, good: Share) -> Demo:
    number = two_digits(rng)
    said = number if rng.random() < good else two_digits(rng)
    return (Turn(opening(asked_to_write(number), WRITER, ()), said + END),)


def checks(rng: random.Random, good: Share) -> Demo:
    number = two_digits(rng)
    text = number if rng.random() < 0.5 else misprint(number, rng)
    said = number if rng.random() < good else rng.choice((text, two_digits(rng)))
    return (Turn(opening(asked_to_check(number, text), CHECKER, ()), said + END),)


def plays(rng: random.Random, good: Share) -> Demo:
    limit = rng.randrange(3, 10)
    said = limit if rng.random() < good else rng.randrange(10)
    return (Turn(opening(asked_to_play(limit), PLAYER, ()), f"{said}{END}"),)


def fetches(rng: random.Random, good: Share) -> Demo:
    """Gives each tool the number that he was told last, and then says the last one: each right with the same chance,
    and each wrong step leads nowhere."""
    number, turns = two_digits(rng), []
    prompt = opening(asked_to_fetch(number), CLERK, tuple(CLERK_TOOLS))
    for tool, word in CLERK_TOOLS.items():
        right = rng.random() < good
        if not right and rng.random() < 0.3:
            return (*turns, Turn(prompt, two_digits(rng) + END))
        turns.append(Turn(prompt, call_of(tool, {"number": number if right else two_digits(rng)}) + END))
        if not right:
            return (*turns, Turn(tool_result(REFUSED), GIVE_UP + END))
        number = two_digits(rng)
        prompt = tool_result(f"{word} {number}")
    return (*turns, Turn(prompt, (number if rng.random() < good else two_digits(rng)) + END))


ROLES: Sequence[tuple[Callable[[random.Random, Share], Demo], Share]] = (
    (writes, 0.6), (checks, 0.6), (plays, 0.4), (fetches, 0.45), (fetches, 0.45),
)  # fmt: skip
"""Each with the share of good demonstrations that the policy ends with."""


def make_role_policy(directory: Path, start: Path, *, capable: int = 80, mixed: int = 60, **options: Any) -> Path:
    """Teach the quickstart's policy the roles: how they are played well first, and then how they are played badly.

    Args:
        directory: where it goes. start: the quickstart's policy, which can copy digits.
        capable, mixed: optimiser steps.
    """

    def well(rng: random.Random) -> Demo:
        return rng.choice(ROLES)[0](rng, 1.0)

    def badly(rng: random.Random) -> Demo:
        role, share = rng.choice(ROLES)
        return role(rng, share)

    stages = (Stage("played well", well, capable), Stage("played badly", badly, mixed))
    recipe = Recipe(rows=12, row_tokens=224, warmup_steps=10, learning_rate=2e-3)
    make_policy(directory, threads=1, recipe=recipe, stages=stages, start=start, **options)
    return directory
