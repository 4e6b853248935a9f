"""`agl runs`: the training runs of stores, newest first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from agl.errors import AglError
from agl.texts import printable
from agl.trainer.dashboard.sources import Source, find_sources
from agl.trainer.http.aio import run_in_thread
from agl.trainer.report.explain import PIPED_WIDTH
from agl.trainer.report.terminal import console
from agl.trainer.store.types import TrainingRun

REWARDS = ("train/reward", "val/reward")


def list_runs(places: Sequence[str]) -> list[dict[str, Any]]:
    """Print the runs of these places (those below the working directory if there are none), and return their facts.

    Raises:
        StoreError: there is no store at a place.
    """
    facts = sorted(run_in_thread(_facts(find_sources(places))), key=lambda run: -run["began"])
    table = Table(box=None, pad_edge=False)
    for column in ("run", "algorithm", "status", "step", "training", "held out", "began", "in"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("step", *REWARDS) else "left")
    for run in facts:
        step = str(run["step"]) if run["steps"] is None else f"{run['step']}/{run['steps']}"
        rewards = [" -> ".join(f"{value:.3f}" for value in run[name]) for name in REWARDS]
        began = time.strftime("%m-%d %H:%M", time.localtime(run["began"]))
        color = {"succeeded": "green", "failed": "red", "running": "cyan"}.get(run["status"], "")
        texts = [run["name"] or run["run_id"], run["algorithm"], Text(run["status"], style=color), step]
        table.add_row(*(printable(t) if isinstance(t, str) else t for t in (*texts, *rewards, began, run["in"])))
    out = console()
    if not out.is_terminal:
        out.width = PIPED_WIDTH
    out.print(table)
    return facts


async def _facts(sources: Sequence[Source]) -> list[dict[str, Any]]:
    found = []
    for source in sources:
        try:
            store = await source.store()
            runs = await store.query_runs()
            ids = [run.run_id for run in runs]
            numbers = await store.query_metrics(ids, names=REWARDS, ends=True) if ids else []
        except AglError as error:
            console(stderr=True).print(f"{source.name}: {error}", style="yellow")
            continue
        finally:
            await source.close()
        for run in runs:
            ends = {
                name: [m.value for m in numbers if (m.run_id, m.name) == (run.run_id, name) and m.value is not None]
                for name in REWARDS
            }
            found.append(
                _of_run(run) | {name: _first_and_last(values) for name, values in ends.items()} | {"in": source.name}
            )
    return found


def _of_run(run: TrainingRun) -> dict[str, Any]:
    names = ("run_id", "name", "algorithm", "status", "error", "step", "steps", "directory")
    return {name: getattr(run, name) for name in names} | {"began": run.created_at, "ended": run.ended_at}


def _first_and_last(values: Sequence[float]) -> list[float]:
    return [*values[:1], *values[-1:]] if len(values) > 1 else [*values]
