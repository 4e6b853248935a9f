"""Finds a run's checkpoints, the local trainer's or verl's, and checks whether one may be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""The folder of a run's directory that holds them."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run resumes: `step` steps are done. `beyond`: what they left for later ones, besides weights."""

    step: int
    path: Path
    beyond: Mapping[str, Any] = field(default_factory=dict)


def latest_checkpoint(directory: Path) -> Path | None:
    """The last whole checkpoint in a run's directory, of the local trainer or of verl."""
    return latest_local(directory) or latest_of_verl(directory)


def latest_local(directory: Path) -> Path | None:
    """The last whole checkpoint that the local trainer wrote."""
    whole = sorted((directory / CHECKPOINTS).glob("step-*/run.json"))
    return whole[-1].parent if whole else None


def latest_of_verl(directory: Path) -> Path | None:
    """The last whole checkpoint that verl wrote; verl stores its step in a separate file."""
    try:
        step = int((directory / CHECKPOINTS / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return None
    return directory / CHECKPOINTS / f"global_step_{step}"


def read_facts(path: Path, shape: Mapping[str, type], *, hint: str) -> dict[str, Any]:
    """The record of a checkpoint, a JSON object with at least the keys of `shape`, of these types.

    Raises:
        CheckpointError: it cannot be read, or has another shape.
    """
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}", hint=hint, path=path) from error
    wrong = [k for k, kind in shape.items() if not isinstance(facts, dict) or not isinstance(facts.get(k), kind)]
    if wrong:
        raise CheckpointError(
            f"the checkpoint's record is not one of agl's: {', '.join(wrong)} missing or of another kind",
            hint=hint,
            path=path,
        )
    return facts


def require_same(then: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` if a run was started with other settings than it would resume with."""
    changed = [f"{k}: {then.get(k)!r} -> {now[k]!r}" for k in now if then.get(k) != now[k]]
    if changed:
        raise CheckpointError(
            f"the run was started with other settings ({'; '.join(changed)})",
            hint="resume with the same settings, or start a new run in another directory",
            path=path,
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a crash leaves either its old content or all of the new; its directory is made."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
