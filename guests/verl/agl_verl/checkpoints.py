"""verl's checkpoints, and next to them a record of what verl does not save: the run's id, settings and history."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
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
from agl_verl import adapters

if TYPE_CHECKING:
    from agl.trainer.run.run import Run
    from agl_verl.config.plan import Plan

_FILE = "run.json"
_FACTS = {"run_id": str, "identity": dict, "history": list}


def folder(run: Run, policy: str | None) -> Path:
    """Where a trainer of verl's writes its checkpoints; `policy`: whose it is, if there are several."""
    return run.directory / CHECKPOINTS if policy is None else run.directory / CHECKPOINTS / "policies" / policy


def restore(run: Run, plans: Mapping[str, Plan]) -> Resumed | None:
    """Restore the history of the last checkpoint, of several policies the last that all have; None if there is none
    yet. verl loads the rest itself.

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
    require_same(facts["identity"], _identity(run, plans), path)
    run.history[:] = [entry for entry in facts["history"] if entry["step"] <= step]
    run.run_id = facts["run_id"]
    run.checkpoint = path
    return Resumed(step, path)


async def record_checkpoint(run: Run, plans: Mapping[str, Plan], step: int, paths: Mapping[str, str]) -> None:
    """Record that verl's trainers wrote a checkpoint each.

    Args:
        paths: of the folders, by policy. Several are linked from one, which is named as verl names its last one.
    """
    write_record(run, plans)
    path = Path(next(iter(paths.values())))
    if len(paths) > 1:
        path = folder(run, None) / path.name
        path.mkdir(exist_ok=True)
        for name, target in paths.items():
            _link(path / name, Path(target))
        write_atomically(folder(run, None) / "latest_checkpointed_iteration.txt", str(step))
    await run.record_checkpoint(path, step)


def write_record(run: Run, plans: Mapping[str, Plan]) -> None:
    """Write the run's record atomically."""
    facts = {"run_id": run.run_id, "identity": _identity(run, plans), "history": run.history}
    write_atomically(run.directory / CHECKPOINTS / _FILE, json.dumps(facts))


def publish(run: Run, policies: Sequence[str]) -> dict[str, Path]:
    """Make the last checkpoint's models the run's policies: `policy`, or `policies/<name>` for each of several, links
    to their Hugging Face directories; adapters are merged.

    Raises:
        CheckpointError: verl wrote none on this machine.
    """
    path = latest_of_verl(run.directory)
    several = len(policies) > 1
    links = {}
    for name in policies:
        of_policy = path / name if path is not None and several else path
        model = None if of_policy is None else of_policy / "actor" / "huggingface"
        if model is None or not any(model.glob("*.safetensors")):
            raise CheckpointError(
                "training ended, and verl left no model in the Hugging Face format",
                hint="keep hf_model in actor_rollout_ref.actor.checkpoint.save_contents; on several nodes the run's "
                "directory must be one that all of them share",
                path=of_policy or run.directory / CHECKPOINTS,
            )
        links[name] = run.directory / "policies" / name if several else run.directory / "policy"
        _link(links[name], adapters.merged(model.parent))
    return links


def _link(link: Path, target: Path) -> None:
    """Make `link` a relative link to a folder, atomically."""
    link.parent.mkdir(exist_ok=True)
    part = link.with_name(f"{link.name}.part")
    part.unlink(missing_ok=True)
    # A target behind links is named by where it is, as a relative path would begin at the links' own folder.
    part.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
    part.rename(link)


def _identity(run: Run, plans: Mapping[str, Plan]) -> dict[str, object]:
    """The settings that a resumed run must share with the run that it resumes."""
    plan = next(iter(plans.values()))
    own = {name: {"model": p.model, "lora_rank": p.lora_rank} for name, p in plans.items()}
    return {
        "seed": run.seed,
        "tasks": len(run.train),
        "model": plan.model,
        "estimator": plan.adv_estimator,
        "group_size": plan.group_size,
        "batch_size": plan.batch_size,
        "mode": plan.mode,
        "lora_rank": plan.lora_rank,
        **({"policies": own} if len(own) > 1 else {}),
    }
