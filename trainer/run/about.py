"""What people note on runs: a name, tags, a text, that it is deleted, and that it is to stop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agl.errors import ConfigError, NotStoredError, StoreError
from agl.trainer.store.base import Store
from agl.trainer.store.types import TrainingRun

LONGEST = 4_000
"""Characters of a name, a tag or a text."""
_ABOUT = "about/"
_STOP = "stop/"


@dataclass(frozen=True, slots=True)
class About:
    """What is noted on a run.

    Attributes:
        name: shown in place of the run's own; "" for that.
        tags: in order.
        note: any text.
        deleted_at: when it was deleted, which hides it from lists; None: it was not, or it was restored.
    """

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""
    deleted_at: float | None = None


async def about(store: Store) -> dict[str, About]:
    """What is noted on the runs of a store, by their ids; runs without notes are left out."""
    notes = await store.query_notes(_ABOUT)
    return {key.removeprefix(_ABOUT): About(**{**n, "tags": tuple(n["tags"])}) for key, n in notes.items()}


async def note(store: Store, run_id: str, changes: Mapping[str, Any]) -> About:
    """Change what is noted on a run: "name", "note", "tags" (all of them), and "deleted" (true or false).

    Raises:
        ConfigError: another name, another type, or a text that is too long.
    """
    values: dict[str, Any] = {}
    for name, value in changes.items():
        match name, value:
            case "name" | "note", str() if len(value) <= LONGEST:
                values[name] = value
            case "tags", list() | tuple() if all(isinstance(tag, str) and len(tag) <= LONGEST for tag in value):
                values[name] = tuple(dict.fromkeys(tag.strip() for tag in value if tag.strip()))
            case "deleted", bool():
                values["deleted_at"] = time.time() if value else None
            case _:
                raise ConfigError(
                    f"{name}={str(value)[:80]!r} cannot be noted on a run",
                    hint=f"name and note are texts of at most {LONGEST:,} characters, tags a list of them, deleted a "
                    "bool",
                    run=run_id,
                )
    changed = replace((await about(store)).get(run_id, About()), **values)
    await store.put_note(_ABOUT + run_id, asdict(changed))
    return changed


async def find_run(store: Store, prefix: str) -> TrainingRun:
    """The run with this id, or the only one whose id begins with it.

    Raises:
        NotStoredError: there is none, or several.
    """
    found = await store.query_runs(run_ids=[prefix]) or [
        run for run in await store.query_runs() if run.run_id.startswith(prefix)
    ]
    if len(found) != 1:
        what = f"{len(found)} runs begin" if found else "no run begins"
        raise NotStoredError(f"{what} with {prefix!r} in this store", hint="agl runs lists them")
    return found[0]


async def request_stop(store: Store, run: TrainingRun) -> None:
    """Have a run end after its current step, with a checkpoint. Whoever trains it reads that after the step.

    Raises:
        StoreError: it is not running.
    """
    if run.status != "running":
        raise StoreError(f"the run has {run.status}", hint="agl runs shows those that are running", run=run.run_id)
    await store.put_note(_STOP + run.run_id, {"at": time.time()})


async def clear_stop_request(store: Store, run_id: str) -> None:
    """Forget an earlier request: the run begins, or is resumed."""
    if (await store.query_notes(_STOP + run_id)).get(_STOP + run_id):
        await store.put_note(_STOP + run_id, None)


async def stop_requested(store: Store, run_id: str) -> bool:
    """Whether `request_stop` was called since the run began, or was resumed."""
    return bool((await store.query_notes(_STOP + run_id)).get(_STOP + run_id))


def shown(runs: Sequence[TrainingRun], notes: Mapping[str, About], *, deleted: bool = False) -> list[TrainingRun]:
    """The runs of a list, under the names that were noted: those that are not deleted, or those alone."""
    return [
        replace(run, name=notes[run.run_id].name or run.name) if run.run_id in notes else run
        for run in runs
        if (run.run_id in notes and notes[run.run_id].deleted_at is not None) == deleted
    ]
