"""`agl runs`, `agl note` and `agl stop`: the training runs of stores, what is noted on them, and ending one."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from agl.errors import AglError, ConfigError
from agl.texts import printable
from agl.trainer.dashboard.sources import Source, find_sources
from agl.trainer.http.aio import run_in_thread
from agl.trainer.report.explain import PIPED_WIDTH
from agl.trainer.report.terminal import console
from agl.trainer.run.about import About, about, find_run, note, request_stop, shown
from agl.trainer.store.base import Store
from agl.trainer.store.location import read_store
from agl.trainer.store.types import TrainingRun

REWARDS = ("train/reward", "val/reward")


def list_runs(places: Sequence[str], *, deleted: bool = False) -> list[dict[str, Any]]:
    """Print the runs of these places (those below the working directory if there are none), and return their facts.

    Args:
        deleted: list those that were deleted instead.

    Raises:
        StoreError: there is no store at a place.
    """
    # Each store has its own order, whatever its clock said; between stores the clocks are all that is known.
    by_store = run_in_thread(_facts(find_sources(places), deleted))
    facts = list(heapq.merge(*by_store, key=lambda run: -run["began"]))
    table = Table(box=None, pad_edge=False)
    tagged = any(run["tags"] for run in facts)
    for column in ("run", "algorithm", "status", "step", "training", "held out", "began", *["tags"] * tagged, "in"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("step", *REWARDS) else "left")
    for run in facts:
        step = str(run["step"]) if run["steps"] is None else f"{run['step']}/{run['steps']}"
        rewards = [" -> ".join(f"{value:.3f}" for value in run[name]) for name in REWARDS]
        began = time.strftime("%m-%d %H:%M", time.localtime(run["began"]))
        color = {"succeeded": "green", "failed": "red", "running": "cyan"}.get(run["status"], "")
        texts = [run["name"] or run["run_id"], run["algorithm"], Text(run["status"], style=color), step]
        last = [*[", ".join(run["tags"])] * tagged, run["in"]]
        table.add_row(*(printable(t) if isinstance(t, str) else t for t in (*texts, *rewards, began, *last)))
    out = console()
    if not out.is_terminal:
        out.width = PIPED_WIDTH
    out.print(table)
    return facts


async def _facts(sources: Sequence[Source], deleted: bool) -> list[list[dict[str, Any]]]:
    """The facts of the runs of each store, newest first."""
    by_store = []
    for source in sources:
        try:
            store = await source.store()
            notes = await about(store)
            runs = shown(await store.query_runs(), notes, deleted=deleted)
            ids = [run.run_id for run in runs]
            numbers = await store.query_metrics(ids, names=REWARDS, ends=True) if ids else []
        except AglError as error:
            console(stderr=True).print(f"{source.name}: {error}", style="yellow")
            continue
        finally:
            await source.close()
        found = []
        for run in runs:
            ends = {
                name: [m.value for m in numbers if (m.run_id, m.name) == (run.run_id, name) and m.value is not None]
                for name in REWARDS
            }
            noted = notes.get(run.run_id, About())
            found.append(
                _of_run(run)
                | {name: _first_and_last(values) for name, values in ends.items()}
                | {"tags": list(noted.tags), "note": noted.note, "in": source.name}
            )
        by_store.append(found)
    return by_store


def _of_run(run: TrainingRun) -> dict[str, Any]:
    names = ("run_id", "name", "algorithm", "status", "error", "step", "steps", "directory")
    return {name: getattr(run, name) for name in names} | {"began": run.created_at, "ended": run.ended_at}


def _first_and_last(values: Sequence[float]) -> list[float]:
    return [*values[:1], *values[-1:]] if len(values) > 1 else [*values]


def note_run(
    store: str | None, prefix: str, changes: Mapping[str, Any], tags: Sequence[str], untags: Sequence[str]
) -> dict[str, Any]:
    """Change what is noted on a run, and return all of it.

    Args:
        prefix: of the run's id.
        changes: as `about.note` takes them.
        tags, untags: to add and to remove.

    Raises:
        StoreError: no such store or run.
        ConfigError: nothing to change, or a value that cannot be noted.
    """
    if not changes and not tags and not untags:
        raise ConfigError("nothing to note", hint="agl note RUN --name, --tag, --untag, --text, --delete or --restore")

    async def change(opened: Store) -> dict[str, Any]:
        run = await find_run(opened, prefix)
        before = (await about(opened)).get(run.run_id, About())
        kept = [tag for tag in (*before.tags, *tags) if tag not in untags]
        return {"run_id": run.run_id, **asdict(await note(opened, run.run_id, {**changes, "tags": kept}))}

    return read_store(store, change)


def stop_run(store: str | None, prefix: str) -> dict[str, Any]:
    """Have a run end after its current step.

    Raises:
        StoreError: no such store or run, or it is not running.
    """

    async def ask(opened: Store) -> dict[str, Any]:
        run = await find_run(opened, prefix)
        await request_stop(opened, run)
        return {"run_id": run.run_id, "step": run.step}

    return read_store(store, ask)
