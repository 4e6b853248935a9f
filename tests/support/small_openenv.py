"""Servers of OpenEnv, started here: a word to guess, as a text or by a typed action."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from app_server import served_app
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

WORDS = ("apple", "pear", "plum", "cherry", "grape", "melon")


class Say(Action):
    word: str


class Place(Action):
    """Put a stone on a field of the row."""

    field: int
    colour: str


class Seen(Observation):
    text: str


class Guess(Environment[Any, Any, State]):
    """Its seed chooses a word (or a field); the right one ends the episode with 1, three wrong ones with 0."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken, self.tries, self.word = broken, 0, ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self.word, self.tries = random.Random(seed).choice(WORDS), 0
        return Seen(text=f"A fruit with {len(self.word)} letters that begins with {self.word[0]}")

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Seen:
        if self.broken:
            raise OSError("the word list's disk is gone")
        self.tries += 1
        right = action.word == self.word if isinstance(action, Say) else action.field == len(self.word)
        return Seen(text="right" if right else "wrong", done=right or self.tries == 3, reward=float(right))

    @property
    def state(self) -> State:
        return State()


@contextlib.contextmanager
def server(*, typed: bool = False, broken: bool = False) -> Iterator[str]:
    """A running server's URL."""
    app = create_fastapi_app(lambda: Guess(broken), Place if typed else Say, Seen, max_concurrent_envs=16)
    with served_app(app) as url:
        yield url
