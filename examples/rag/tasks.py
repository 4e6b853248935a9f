"""Two-hop questions over passages of made-up names, or a user's own in MuSiQue's form; the reward."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl.errors import DatasetError
from agl.rewards import RegexMatch, TokenF1, Trace

Task = dict[str, Any]
"""`question`, `answer` (a list: any of them is right), and the `passages` that it takes."""

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_f1, _form = TokenF1(output=ANSWER), RegexMatch(ANSWER)


def reward(task: Task, output: Any, trace: Trace) -> dict[str, float]:
    """Token F1 of what is in the answer's tags, and 0.1 for the tags. `f1` and `recall@3` are shown, not trained on."""
    f1 = _f1(task, output)
    return {"reward": f1 + 0.1 * _form(task, output), "f1": f1, "recall@3": recall(task, trace)}


def recall(task: Task, trace: Trace) -> float:
    """The share of the task's passages that were among a search's results."""
    found = "\n".join(str(tool.attributes.get("gen_ai.tool.call.result", "")) for tool in trace.tools)
    return sum(passage in found for passage in task["passages"]) / len(task["passages"])


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages to search in, and questions about them."""

    passages: list[str]
    train: list[Task]
    held_out: list[Task]


# -- the small form ---------------------------------------------------------------------------------------------------

_MARKS = {"person": "-", "town": ":", "country": "_", "river": "~"}
MARKS = "".join(_MARKS.values())
"""A name is a head, its kind's mark and a tail: "Be-ra" is a person, "Be:ra" a town. Heads and tails recur, names do
not, and what is to be copied always stands after something that tells what it is. A policy of two layers learns that in
minutes; to go on as an earlier text went on, which other names would take, much later."""
_CONSONANTS = {"country": ("BCDFGHJKLM", "bdfghkm"), "river": ("NPRSTVWXYZ", "pxzlrnst")}
"""Of heads and tails: a result has both kinds of places, and where they sound alike, the policy mixes them for long."""
KINDS = {"country": ("in", "{} lies in the country {}."), "river": ("on", "{} lies on the river {}.")}


def generate(
    seed: int = 0, people: int = 300, towns: int = 100, held_out: float = 0.2, kinds: Sequence[str] = tuple(KINDS)
) -> Corpus:
    """A world of people who live in towns, which belong to a country and lie on a river, where there are both `kinds`.

    The share `held_out` of it has names that are not in the rest, and comes last in the index.
    """
    rng, known, unknown = _names(seed, held_out)
    passages, train = _world(rng, known, round(people * (1 - held_out)), round(towns * (1 - held_out)), kinds)
    others, tasks = _world(rng, unknown, round(people * held_out), round(towns * held_out), kinds)
    return Corpus(passages + others, train, tasks)


def practice(
    seed: int = 0, people: int = 1600, towns: int = 2800, held_out: float = 0.2, kinds: Sequence[str] = tuple(KINDS)
) -> Corpus:
    """A larger world for a policy from scratch to learn the form in, without the held-out names of `generate`."""
    rng, known, _ = _names(seed, held_out)
    for names in known.values():
        rng.shuffle(names)
    return Corpus(*_world(rng, known, people, towns, kinds), [])


Names = dict[str, list[str]]
"""Kind -> names, in random order."""


def _names(seed: int, held_out: float) -> tuple[random.Random, Names, Names]:
    """All names, divided into those of training and those of held-out questions."""
    rng = random.Random(f"rag {seed}")
    known: Names = {}
    unknown: Names = {}
    for kind, mark in _MARKS.items():
        heads, tails = _CONSONANTS.get(kind, ("BCDFGHJKLMNPRSTVWXYZ", "bdfghkmpxzlrnst"))
        names = [a + b + mark + c + d for a in heads for b in "aeo" for c in tails for d in "aeio"]
        rng.shuffle(names)
        size = round(len(names) * held_out)
        known[kind], unknown[kind] = names[size:], names[:size]
    return rng, known, unknown


def _world(
    rng: random.Random, names: Names, people: int, towns: int, kinds: Sequence[str]
) -> tuple[list[str], list[Task]]:
    """Passages, and a question about each of the people and each of the kinds, both in random order."""
    passages, tasks = [], []
    facts: list[tuple[str, dict[str, tuple[str, str]]]] = []
    for town in names["town"][:towns]:
        places = {kind: rng.choice(names[kind][: towns // 2]) for kind in kinds}
        facts.append((town, {kind: (place, KINDS[kind][1].format(town, place)) for kind, place in places.items()}))
        passages += [passage for _, passage in facts[-1][1].values()]
    for person in names["person"][:people]:
        town, about = rng.choice(facts)
        # Longer than what is said of a town, which is thus found first.
        home = f"To this very day {person} lives in {town}."
        passages.append(home)
        for kind, (place, passage) in about.items():
            question = f"Which {kind} is the town {KINDS[kind][0]} that {person} lives in?"
            tasks.append({"question": question, "answer": [place], "passages": [home, passage]})
    rng.shuffle(passages)
    rng.shuffle(tasks)
    return passages, tasks


# -- a user's own -----------------------------------------------------------------------------------------------------


def load(questions: Path, passages: Path | None = None, held_out: int = 200) -> Corpus:
    """Questions in MuSiQue's form: `question`, `answer`, `answer_aliases`, `paragraphs` (`title`, `paragraph_text`,
    `is_supporting`), one JSON object per line. The last `held_out`, at most a half, are not trained on.

    Args:
        passages: what is searched, one `{"title": ..., "paragraph_text": ...}` per line; the questions' paragraphs if
            None.

    Raises:
        DatasetError: no such file, or a line of another form.
    """
    tasks: list[Task] = []
    told: dict[str, None] = {}
    for where, row in _rows(questions):
        try:
            texts = [(_text(paragraph), bool(paragraph.get("is_supporting"))) for paragraph in row["paragraphs"]]
            answers = [row["answer"], *row.get("answer_aliases", ())]
            task = {"question": row["question"], "answer": answers, "passages": [t for t, needed in texts if needed]}
        except (AttributeError, KeyError, TypeError) as error:
            raise _no_musique(error, where, '{"question", "answer", "paragraphs": [...]}') from error
        if not row.get("answerable", True):
            continue
        if not task["passages"]:
            raise _no_musique("no paragraph is_supporting", where, "mark those that the answer takes")
        tasks.append(task)
        told |= dict.fromkeys(text for text, _ in texts)
    if passages is not None:
        told = {}
        for where, row in _rows(passages):
            try:
                told[_text(row)] = None
            except (KeyError, TypeError) as error:
                raise _no_musique(error, where, '{"title", "paragraph_text"}') from error
    size = min(held_out, len(tasks) // 2)
    return Corpus(list(told), tasks[: len(tasks) - size], tasks[len(tasks) - size :])


def _text(paragraph: dict[str, Any]) -> str:
    return f"{paragraph['title']}: {paragraph['paragraph_text']}"


def _rows(file: Path) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DatasetError(f"cannot be read: {error.strerror}", hint="name a .jsonl file", path=file) from error
    for number, line in enumerate(lines, start=1):
        where = {"path": file, "line": number}
        try:
            yield where, json.loads(line)
        except ValueError as error:
            raise _no_musique(error, where, "one JSON object per line") from error


def _no_musique(error: object, where: dict[str, Any], form: str) -> DatasetError:
    return DatasetError(f"not MuSiQue's form: {error}", hint=f"wanted: {form}", **where)
