"""Checkpoints: everything that a resumed run needs to continue as if it had never stopped, written all or nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from agl.errors import CheckpointError, EngineError
from agl.trainer.algorithms.settings import TrainingSettings
from agl.trainer.policies.policies import Policies
from agl.trainer.run.checkpoints import CHECKPOINTS, Resumed, latest_local, read_facts, require_same
from agl.trainer.run.run import Run

KEEP = 2

_FACTS = {"run_id": str, "step": int, "seed": int, "tasks": int, "algorithm": dict, "history": list}


async def save(run: Run, policies: Policies, step: int, identity: dict[str, Any], beyond: Mapping[str, Any]) -> Path:
    """Write the state after `step` completed steps, and drop all but the last few checkpoints.

    The dataset's order and each request's seed are functions of the run's seed and the step, so the step is all, but
    for what is in `beyond`.
    """
    root = run.directory / CHECKPOINTS
    final = root / f"step-{step:06d}"
    part = root / f".step-{step:06d}.part"
    facts = {
        "run_id": run.run_id,
        "step": step,
        "seed": run.seed,
        "policy_versions": policies.versions,
        "algorithm": identity,
        "tasks": len(run.train),
        "history": run.history,
        "beyond": dict(beyond),
    }
    try:
        shutil.rmtree(part, ignore_errors=True)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.mkdir()
        await policies.save_states(part)
        await policies.save_models(part)
        with (part / "run.json").open("w") as f:
            json.dump(facts, f)
            f.flush()
            os.fsync(f.fileno())
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
    except (OSError, EngineError) as error:
        shutil.rmtree(part, ignore_errors=True)
        last = "" if run.checkpoint is None else f"; {run.checkpoint.name} is whole"
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be written: {error}{last}",
            hint="check the space on the disk and the directory's permissions, then resume",
            path=root,
        ) from error
    for old in sorted(root.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    await run.record_checkpoint(final, step)
    return final


async def restore(run: Run, policies: Policies, identity: dict[str, Any], settings: TrainingSettings) -> Resumed | None:
    """Load the last checkpoint into the policies and the run; None when there is none yet.

    Raises:
        CheckpointError: it cannot be read, or it was made with other settings.
    """
    path = latest_local(run.directory)
    if path is None:
        return None
    facts = read_facts(path / "run.json", _FACTS, hint="delete the checkpoint's folder to resume from the one before")
    now = {"seed": run.seed, "tasks": len(run.train), **identity}
    # A setting that is newer than the checkpoint had its default.
    defaults = {f.name: f.default for f in fields(settings) if f.default is not MISSING}
    then = {"seed": facts["seed"], "tasks": facts["tasks"], **defaults, **facts["algorithm"]}
    require_same(then, now, path)
    await policies.load_states(path)
    run.history[:] = facts["history"]
    run.run_id = facts["run_id"]
    run.checkpoint = path
    return Resumed(facts["step"], path, facts.get("beyond", {}))
