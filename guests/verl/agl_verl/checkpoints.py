"""verl's checkpoints, and next to them a record of what verl does not save: the run's id, settings and history."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from agl.errors import CheckpointError
from agl.trainer.run.checkpoints import (
    CHECKPOINTS,
    Resumed,
    latest_of_verl,
    read_facts,
    require_same,
    write_atomically,
)

if TYPE_CHECKING:
    from agl.trainer.run.run import Run
    from agl_verl.config.plan import Plan

_FILE = "run.json"
_FACTS = {"run_id": str, "identity": dict, "history": list}


def restore(run: Run, plan: Plan) -> Resumed | None:
    """Restore the history of the last checkpoint; None if there is none yet. verl loads the rest itself.

    Raises:
        CheckpointError: it cannot be read, or it was made with other settings.
    """
    path = latest_of_verl(run.directory)
    if path is None:
        return None
    step = int(path.name.removeprefix("global_step_"))
    facts = read_facts(
        run.directory / CHECKPOINTS / _FILE,
        _FACTS,
        hint="start a new run in another directory; the weights are in that folder",
    )
    require_same(facts["identity"], _identity(run, plan), path)
    run.history[:] = [entry for entry in facts["history"] if entry["step"] <= step]
    run.run_id = facts["run_id"]
    run.checkpoint = path
    return Resumed(step, path)


async def record_checkpoint(run: Run, plan: Plan, step: int, path: str) -> None:
    """Record that verl wrote a checkpoint."""
    write_record(run, plan)
    await run.record_checkpoint(Path(path), step)


def write_record(run: Run, plan: Plan) -> None:
    """Write the run's record atomically."""
    facts = {"run_id": run.run_id, "identity": _identity(run, plan), "history": run.history}
    write_atomically(run.directory / CHECKPOINTS / _FILE, json.dumps(facts))


def publish(run: Run) -> Path:
    """Make the last checkpoint's model the run's policy: `policy`, a link to its Hugging Face directory.

    Raises:
        CheckpointError: verl wrote none on this machine.
    """
    path = latest_of_verl(run.directory)
    model = None if path is None else path / "actor" / "huggingface"
    if path is None or model is None or not any(model.glob("*.safetensors")):
        raise CheckpointError(
            "training ended, and verl left no model in the Hugging Face format",
            hint="keep hf_model in actor_rollout_ref.actor.checkpoint.save_contents; on several nodes the run's "
            "directory must be one that all of them share",
            path=path or run.directory / CHECKPOINTS,
        )
    link = run.directory / "policy"
    part = run.directory / "policy.part"
    part.unlink(missing_ok=True)
    part.symlink_to(os.path.relpath(model, run.directory))
    part.rename(link)
    return link


def _identity(run: Run, plan: Plan) -> dict[str, object]:
    """The settings that a resumed run must share with the run that it resumes."""
    return {
        "seed": run.seed,
        "tasks": len(run.train),
        "model": plan.model,
        "estimator": plan.adv_estimator,
        "group_size": plan.group_size,
        "batch_size": plan.batch_size,
        "mode": plan.mode,
        "lora_rank": plan.lora_rank,
    }
