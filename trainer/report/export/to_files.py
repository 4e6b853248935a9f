"""Writes a store's rollouts, spans and calls into a folder, all of them or nothing."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, get_args

from agl.errors import ConfigError, ExportError, nearest
from agl.extras import require
from agl.trainer.report.export.json_files import JsonTree, json_lines
from agl.trainer.report.export.parquet import parquet
from agl.trainer.report.export.rows import Record, RolloutFilter, records
from agl.trainer.report.progress import Progress
from agl.trainer.store.base import Store
from agl.trainer.store.types import Mode


class Writer(Protocol):
    """One format of files."""

    def add(self, record: Record) -> None:
        """Write a rollout."""
        ...

    def close(self) -> None:
        """Finish what is open."""
        ...


def _massgen(folder: Path, *, tokens: bool) -> Writer:
    # The distribution agl-massgen imports this module.
    require('the format "massgen"', "massgen")
    return importlib.import_module("agl_massgen.files").MassGenFiles(folder, tokens=tokens)


FORMATS: Mapping[str, Callable[..., Writer]] = {
    "jsonl": json_lines,
    "json": JsonTree,
    "parquet": parquet,
    "massgen": _massgen,
}


async def to_files(
    store: Store, out: Path, format: str, filter: RolloutFilter, *, tokens: bool = True, quiet: bool = False
) -> dict[str, Any]:
    """Write the rollouts into `out`: all of them, or nothing at all.

    Args:
        out: a folder, created if it does not exist; existing files of the same names are replaced.
        format: "jsonl", "json", "parquet" or "massgen".
        filter: conditions on the rollouts.
        tokens: whether calls have their token ids and log-probs.

    Returns:
        The numbers of `rollouts`, `spans`, `calls`, `files` and `bytes` that were written, and the `seconds` it took.

    Raises:
        ConfigError: the format or the mode is unknown, `out` is a file, or pyarrow is missing.
        ExportError: no rollout matches, or writing fails.
    """
    if format not in FORMATS:
        raise ConfigError(f"there is no format {format!r}", hint=nearest(format, FORMATS))
    if filter.mode is not None and filter.mode not in get_args(Mode):
        raise ConfigError(f"there is no mode {filter.mode!r}", hint=nearest(filter.mode, get_args(Mode)))
    total = await filter.count(store)
    if not total:
        raise ExportError("no rollout of this store fits", hint="agl trace ls shows those that there are")
    counts: Counter[str] = Counter()
    started = time.monotonic()
    progress = Progress(not quiet, label="rollouts")
    progress.began("export", 0, total)
    try:
        with atomic_folder(out) as folder:
            with contextlib.closing(FORMATS[format](folder, tokens=tokens)) as writer:
                async for record in records(store, filter, total):
                    writer.add(record)
                    counts.update(rollouts=1, spans=len(record.spans), calls=len(record.calls))
                    progress.count()
            written = [p for p in folder.rglob("*") if p.is_file()]
            counts.update(files=len(written), bytes=sum(p.stat().st_size for p in written))
    except OSError as error:
        raise ExportError(
            f"cannot write the export: {error}", hint="choose a folder on a disk with free space, with --out", path=out
        ) from error
    finally:
        progress.stop()
    return {"out": str(out), "format": format, **counts, "seconds": time.monotonic() - started}


@contextlib.contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """An empty folder next to `out`. Files that the block writes there are moved to `out`, or deleted if it fails.

    Raises:
        ConfigError: `out` is a file.
    """
    out = out.absolute()
    if out.exists() and not out.is_dir():
        raise ConfigError("the export is a folder of files, but this is a file", hint="choose another --out", path=out)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"
    folder.mkdir(mode=0o700)
    try:
        yield folder
        for path in folder.rglob("*"):  # for this user alone, as the store is
            path.chmod(0o700 if path.is_dir() else 0o600)
        if out.exists():
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                target = out / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
        else:
            folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
