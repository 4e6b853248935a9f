"""Scripted models: one that is always right, one that knows the form and mostly errs."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from agl.testing.provider import Reply

_PERSON = re.compile(r"that (\S+) lives in\?")

MISTAKES = {"none": 32, "guess": 15, "one hop": 14, "same query": 7, "half a name": 7, "other kind": 10, "no tags": 15}
"""What the beginner does, in percent of the questions."""
MORE_MISTAKES = MISTAKES | {"none": 5}
"""The same where all questions are about one kind of place, so that "other kind" is none either."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a request says: the question, its person and kind of place, and each search's results."""

    question: str
    person: str
    kind: str
    results: list[list[str]]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Seen:
        said = [(message["role"], _text(message.get("content"))) for message in body["messages"]]
        question = next(text for role, text in said if role == "user")
        person = _PERSON.search(question)
        results = [text.splitlines() for role, text in said if role == "tool"]
        return cls(question, person[1] if person else "", "river" if "river" in question else "country", results)

    def place(self, kind: str) -> str:
        """What the last results say of a kind of place, or else first."""
        return _end([text for text in self.results[-1] if kind in text] or self.results[-1])


def oracle(body: dict[str, Any]) -> Reply:
    """Searches for the person, then for the town, and reads the place."""
    seen = Seen.of(body)
    match len(seen.results):
        case 0:
            return _search(seen.person)
        case 1:
            return _search(_end(seen.results[0]))
        case _:
            return _answer(seen.place(seen.kind))


def beginner(body: dict[str, Any], mistakes: dict[str, int] = MISTAKES) -> Reply:
    """Makes a mistake that the question decides, the same at every run."""
    seen = Seen.of(body)
    mistake = random.Random(seen.question).choices(list(mistakes), list(mistakes.values()))[0]
    match mistake, len(seen.results):
        case ("guess", 0) | ("half a name", 1):
            return _answer(seen.person)
        case "half a name", 0:
            return _search(seen.person.split("-")[0])
        case "one hop", 1:
            return _answer(_end(seen.results[0]))
        case "same query", 1:
            return _search(seen.person)
        case "same query", 2:
            return _answer(_end(seen.results[0]))
        case "other kind", 2:
            return _answer(seen.place("river" if seen.kind == "country" else "country"))
        case "no tags", 2:
            return Reply(seen.place(seen.kind))
        case _:
            return oracle(body)


def _end(passages: list[str]) -> str:
    """The last word of the first passage."""
    return passages[0].rstrip(".").split(" ")[-1]


def _search(query: str) -> Reply:
    return Reply(tools=(("search", {"query": query}),))


def _answer(text: str) -> Reply:
    return Reply(f"<answer>{text}</answer>")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())
