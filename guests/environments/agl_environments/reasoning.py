"""Tasks of `reasoning-gym`, which it generates and grades: one question, one answer."""

# The package may be missing where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from agl.errors import ConfigError, nearest
from agl_environments.asking import Ask, message_of


class ReasoningGym:
    """One of its data sets, such as "gcd".

    Args:
        system: a system prompt. **options: the data set's own, such as `max_value=40`.

    The answer is the text in `<answer>` tags, or the whole text where there are none.
    """

    def __init__(self, name: str, *, system: str | None = None, **options: Any) -> None:
        if name not in DATASETS:
            raise ConfigError(f"reasoning-gym has no data set {name!r}", hint=nearest(name, DATASETS))
        self._name = name
        self._system = system
        self._options = options

    def tasks(self, n: int | None, seed: int) -> list[dict[str, Any]]:
        try:
            options = json.dumps({**self._options, "seed": seed, "size": n or 100}, sort_keys=True)
        except TypeError as error:
            raise ConfigError(
                f"an option of {self._name!r} is no JSON: {error}", hint="numbers, texts, lists"
            ) from None
        entries = _dataset(self._name, options)
        return [
            {"dataset": self._name, "options": options, "index": i, "question": e["question"], "answer": e["answer"]}
            for i, e in enumerate(entries[i] for i in range(n or 100))
        ]

    async def play(self, task: Mapping[str, Any], ask: Ask) -> float:
        system = [{"role": "system", "content": self._system}] if self._system else []
        text = message_of(await ask([*system, {"role": "user", "content": task["question"]}]))["content"]
        return await asyncio.to_thread(_score, task, text)


def _score(task: Mapping[str, Any], text: str) -> float:
    dataset = _dataset(task["dataset"], task["options"])
    entry = dataset[task["index"]]
    answer = (extract_answer(text) or text).strip()
    if not answer:
        return 0.0
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:
        # A grader that can grade the right answer is in order: it was this answer that it could not read.
        dataset.score_answer(entry["answer"], entry)
        return 0.0


@functools.cache
def _dataset(name: str, options: str) -> Any:
    try:
        return reasoning_gym.create_dataset(name, **json.loads(options))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym refuses the options of {name!r}: {error}", hint="see its config") from error
