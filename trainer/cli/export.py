"""`agl export` and `agl trace export`: select rollouts of a store, and write or send them; write a policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agl.errors import ConfigError, ExportError
from agl.trainer.cli.options import duration
from agl.trainer.http.aio import run_in_thread
from agl.trainer.report.export.otlp import send
from agl.trainer.report.export.rows import RolloutFilter, record, records
from agl.trainer.report.export.to_files import to_files
from agl.trainer.report.progress import Progress
from agl.trainer.store.base import Store
from agl.trainer.store.location import read_store


def export_files(
    store: str | None, out: Path, format: str, which: RolloutFilter, *, tokens: bool, quiet: bool
) -> dict[str, Any]:
    """Write rollouts into files. Returns the facts of `to_files`."""
    return read_store(store, lambda opened: to_files(opened, out, format, which, tokens=tokens, quiet=quiet))


def export_examples(what: str, out: Path, options: dict[str, Any], **choices: Any) -> dict[str, Any]:
    """Write what other trainers learn from. `options`: of `Traces`; `choices`: of `files.write`, whose facts this
    returns."""
    from agl.trainer.traces.files import write
    from agl.trainer.traces.stored import Traces

    return run_in_thread(write(Traces(**options), what, out, **choices))  # type: ignore[arg-type]


def export_policy(model: str, out: Path | None, precision: str, *, quiet: bool) -> dict[str, Any]:
    """Write a policy as a GGUF file. Returns the facts of `export_gguf`."""
    from agl.trainer.local.gguf_export import export_gguf
    from agl.trainer.local.loading import LoadingProgress

    progress = Progress(not quiet, label="tensors")

    def show(done: int, total: int) -> None:
        if done == 0:
            progress.began("export", 0, total)
        else:
            progress.count()

    try:
        with LoadingProgress(progress.loading):
            return export_gguf(model, out, precision, on_tensors=show)
    finally:
        progress.stop()


def described(facts: Mapping[str, Any]) -> str:
    """What `export_policy` wrote, and how to use it."""
    file = facts["file"]
    size = f"{facts['bytes'] / 1e6:,.1f} MB"
    lines = [
        f"{size} in {file}: {facts['architecture']}, {facts['type']}, {facts['tensors']} tensors",
        *(f"note       {note}" for note in facts["notes"]),
        f"llama.cpp  llama-server -m {file} --jinja",
        f"Ollama     ollama create NAME -f Modelfile, with the line: FROM {Path(file).resolve()}",
    ]
    return "\n".join(lines)


def export_traces(
    store: str | None,
    rollouts: Sequence[str],
    which: RolloutFilter | None,
    url: str,
    headers: Sequence[str],
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Send the spans of the named rollouts, or of those that fit `which`. Returns the facts of `otlp.send`.

    Raises:
        ConfigError: both or neither of the two, or a header that is not NAME=VALUE.
        ExportError: no rollout fits, or the receiver takes none.
    """
    if bool(rollouts) == (which is not None):
        raise ConfigError("which rollouts?", hint="name them: agl trace export ROLLOUT..., or give --run ID, or --all")
    fields = dict(_header(h) for h in headers)

    async def main(opened: Store) -> dict[str, Any]:
        total = len(rollouts) if which is None else await which.count(opened)
        if not total:
            raise ExportError("no rollout of this store fits", hint="agl trace ls shows those that there are")
        named = (await record(opened, await opened.get_rollout(name)) for name in rollouts)
        matches = named if which is None else records(opened, which, total)
        started, progress = time.monotonic(), Progress(not quiet, label="rollouts")
        progress.began("export", 0, total)
        try:
            facts = await send(matches, url, fields, sent=progress.count)
        finally:
            progress.stop()
        return facts | {"seconds": time.monotonic() - started}

    return read_store(store, main)


def since(text: str | None, now: float | None = None) -> float | None:
    """A time in seconds since the epoch, from a date or time in ISO 8601 (UTC unless it has an offset), or from an age:
    "90m", "12h", "7d".

    Raises:
        ConfigError: it is neither.
    """
    if text is None:
        return None
    if (ago := duration(text)) is not None:
        return (time.time() if now is None else now) - ago
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--since is {text!r}", hint="write a date (2026-11-21), a time (2026-11-21T08:30) or an age (90m, 12h, 7d)"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError("a --header is not NAME=VALUE", hint="for example --header Authorization='Bearer KEY'")
    return name.strip(), value
