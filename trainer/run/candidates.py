"""The candidates of a prompt search: what each was rewritten from, how it did, and what changed in its texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import Literal

from agl.agents.resources import PromptTemplate, SystemPrompt, resource_from_json
from agl.trainer.store.base import Resources

MOST_WORD_PAIRS = 4_000_000
"""Texts with more pairs of words are not compared word by word, which takes time in proportion to these."""

Change = tuple[Literal["same", "removed", "added"], str]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of a candidate on some tasks.

    Attributes:
        step: of the run's history.
        candidate: the version of the resources that holds its texts.
        parent: the version that it was rewritten from; None for the start, and for what was combined from others.
        split: the tasks that it ran on: "train", "val", "held_out/start" or "held_out".
        tasks: how many.
        score: mean over the rollouts.
        low, high: its 95 % interval.
    """

    step: int
    candidate: str
    parent: str | None
    split: str
    tasks: int
    score: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate and its evaluations, in order.

    Attributes:
        number: in the order in which candidates were first evaluated; 0 is the start.
        parent: the number of the
            candidate that it was rewritten from. depth: how many rewritings lie between it and one without a parent.
        texts: by component.
        chosen: whether it is the result of the search.
    """

    number: int
    parent: int | None
    depth: int
    texts: Mapping[str, str]
    chosen: bool
    evaluations: Sequence[Evaluation]


async def record(store: Resources, run_id: str, evaluation: Evaluation) -> None:
    """Keep an evaluation in the store; that of the same step again changes nothing."""
    await store.put_note(f"{_prefix(run_id)}{evaluation.step:07d}", asdict(evaluation))


async def candidates(store: Resources, run_id: str) -> list[Candidate]:
    """The candidates of a search so far; none of a run that is no search."""
    notes = await store.query_notes(_prefix(run_id))
    if not notes:
        return []
    evaluated: dict[str, list[Evaluation]] = {}
    for evaluation in (Evaluation(**notes[key]) for key in sorted(notes)):
        evaluated.setdefault(evaluation.candidate, []).append(evaluation)
    versions = {name: _texts(values) for name, values in await store.query_resources(f"{run_id}-")}
    chosen = versions.get(f"{run_id}-best")
    found: dict[str, Candidate] = {}
    for name, evaluations in evaluated.items():
        parent = found.get(evaluations[0].parent or "")
        number, depth = (parent.number, parent.depth + 1) if parent else (None, 0)
        texts = versions.get(name, {})
        found[name] = Candidate(len(found), number, depth, texts, texts == chosen, evaluations)
    return list(found.values())


def changes(before: str, after: str) -> list[Change]:
    """What was removed and added, by words; the texts in full where they are long and differ much."""
    old, new = (re.findall(r"\s+|\S+", text) for text in (before, after))
    if len(old) * len(new) > MOST_WORD_PAIRS:
        return [("same", before)] if before == after else [("removed", before), ("added", after)]
    found: list[Change] = []
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        removed = "".join(old[a:b])
        added = "".join(new[c:d])
        if kind == "equal":
            found.append(("same", removed))
            continue
        if removed:
            found.append(("removed", removed))
        if added:
            found.append(("added", added))
    return found


def _prefix(run_id: str) -> str:
    return f"candidates/{run_id}/"


def _texts(values: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    resources = {name: resource_from_json(value) for name, value in values.items()}
    templates = {name: r.template for name, r in resources.items() if isinstance(r, PromptTemplate)}
    return templates | {name: r.text for name, r in resources.items() if isinstance(r, SystemPrompt)}
