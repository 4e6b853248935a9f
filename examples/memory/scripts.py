"""Scripted models: one that looks up what it is asked, and one that mostly guesses, which the tiny policy imitates."""

from __future__ import annotations

import random
import re
from typing import Any

from agl.testing.provider import Reply, last_said
from examples.memory.tasks import DRINKS, NOTED

NAME = re.compile(r"C-\d{3}")
PREFERS = re.compile(r"(C-\d{3}) prefers (\w+)")

# How a beginner goes about a question: it looks the customer up, mistakes the number, or just answers.
LOOKS_UP, MISREADS = 0.3, 0.15


def oracle(body: dict[str, Any]) -> Reply:
    """Notes what it is told, looks up what it is asked, and says what it finds."""
    role, text = last_said(body)
    if role == "tool":
        return Reply(_found(text) or _guess(body))
    if PREFERS.search(text):
        return Reply(NOTED)
    [name] = NAME.findall(text)
    return Reply(tools=(("recall", {"query": name}),))


def beginner(body: dict[str, Any]) -> Reply:
    """As the oracle, but it seldom looks up what it is asked."""
    role, text = last_said(body)
    if role == "tool" or PREFERS.search(text):
        return oracle(body)
    [name] = NAME.findall(text)
    rng = random.Random(text)
    draw = rng.random()
    if draw > LOOKS_UP + MISREADS:
        return Reply(_guess(body))
    return Reply(tools=(("recall", {"query": name if draw < LOOKS_UP else f"{name[:-1]}{rng.randrange(10)}"}),))


def _found(text: str) -> str | None:
    facts = PREFERS.findall(text)
    return facts[0][1] if facts else None


def _guess(body: dict[str, Any]) -> str:
    [question] = [message["content"] for message in body["messages"] if message["role"] == "user"]
    return random.Random(f"guess/{question}").choice(DRINKS)
