"""Checkpoints: everything that a resumed run needs to continue as if it had never stopped, written all or nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from agl.errors import CheckpointError
from agl.trainer.run.checkpoints import Resumed, checkpoints_folder, latest_local, require_same
from agl.trainer.run.policies import Policies
from agl.trainer.run.run import Run

KEEP = 2


async def save(run: Run, policies: Policies, step: int, identity: dict[str, Any]) -> Path:
    """Write the state after `step` completed steps, and drop all but the last few checkpoints.

    The dataset's order and each request's seed are functions of the run's seed and the step, so the step is all.
    """
    root = checkpoints_folder(run.directory)
    final = root / f"step-{step:06d}"
    part = root / f".step-{step:06d}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    await policies.save_states(part)
    await policies.save_models(part)
    facts = {
        "run_id": run.run_id,
        "step": step,
        "seed": run.seed,
        "policy_versions": policies.versions,
        "algorithm": identity,
        "tasks": len(run.train),
        "history": run.history,
    }
    with (part / "run.json").open("w") as f:
        json.dump(facts, f)
        f.flush()
        os.fsync(f.fileno())
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    run.checkpoint = final
    for old in sorted(root.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


async def restore(run: Run, policies: Policies, identity: dict[str, Any]) -> Resumed | None:
    """Load the last checkpoint into the policies and the run; None when there is none yet.

    Raises:
        CheckpointError: it cannot be read, or it was made with other settings.
    """
    path = latest_local(run.directory)
    if path is None:
        return None
    try:
        facts = json.loads((path / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint cannot be read: {error}", hint="delete it to resume from the one before", path=path
        ) from error
    now = {"seed": run.seed, "tasks": len(run.train), **identity}
    then = {"seed": facts["seed"], "tasks": facts["tasks"], **facts["algorithm"]}
    require_same(then, now, path)
    await policies.load_states(path)
    run.history[:] = facts["history"]
    run.run_id = facts["run_id"]
    run.checkpoint = path
    return Resumed(facts["step"], path)
