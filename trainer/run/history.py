"""The history in a run's last checkpoint, for stores without metrics of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agl.trainer.run.checkpoints import CHECKPOINTS, latest_local, latest_of_verl, read_facts
from agl.trainer.run.recorder import add_history
from agl.trainer.store.base import Runs
from agl.trainer.store.types import TrainingRun

_FACTS = {"run_id": str, "history": list}


@dataclass(frozen=True, slots=True)
class SavedHistory:
    """What a checkpoint knows of its run.

    Attributes:
        run_id: of the run.
        step: completed steps.
        saved_at: seconds since the epoch.
        algorithm: the name of its class.
        settings: the algorithm's.
        entries: one dict per step.
    """

    run_id: str
    step: int
    saved_at: float
    algorithm: str
    settings: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]


def read_history(directory: Path) -> SavedHistory | None:
    """The history in the last checkpoint of a run's directory, the local trainer's or verl's; None without one.

    Raises:
        CheckpointError: it cannot be read.
    """
    checkpoint = latest_local(directory)
    path = None if checkpoint is None else checkpoint / "run.json"
    if checkpoint is None and (checkpoint := latest_of_verl(directory)) is not None:
        path = directory / CHECKPOINTS / "run.json"
    if checkpoint is None or path is None:
        return None
    facts = read_facts(path, _FACTS, hint="delete the checkpoint's folder to use the one before")
    # "step-000012" or "global_step_12"
    step = int(checkpoint.name.replace("_", "-").rpartition("-")[2])
    entries = [entry for entry in facts["history"] if entry["step"] <= step]
    settings = dict(facts.get("algorithm") or facts.get("identity") or {})
    algorithm = str(settings.pop("algorithm", "VERL"))
    return SavedHistory(facts["run_id"], step, path.stat().st_mtime, algorithm, settings, entries)


async def import_history(store: Runs, directory: Path) -> None:
    """Add the history of a directory's last checkpoint to the store, if that does not have it.

    So the curves of runs from before stores had metrics can be seen. A run that the store does not know is added as
    "stopped": how it ended is unknown. Repeating it changes nothing.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        StoreError: the store cannot be written.
    """
    saved = read_history(directory)
    if saved is None:
        return
    known = next(iter(await store.query_runs(run_ids=[saved.run_id])), None)
    run = known or TrainingRun(
        saved.run_id, status="stopped", step=saved.step, created_at=saved.saved_at, ended_at=saved.saved_at
    )
    if run.directory is None:
        # Known by its rollouts at most.
        run = replace(
            run,
            algorithm=saved.algorithm,
            config={f"algorithm.{name}": value for name, value in saved.settings.items()},
            directory=str(directory.absolute()),
            step=max(run.step, saved.step),
            steps=saved.settings.get("steps"),
        )
        await store.put_run(run)
    await add_history(store, saved.run_id, saved.entries)
