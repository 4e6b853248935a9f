"""Rollouts as JSON Lines, or as one JSON file each in folders by date and agent. Strict JSON: NaN becomes null."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from agl.trainer.report.export.rows import Record, call_records, rollout_record, span_records

LONGEST_NAME = 100


class Tables:
    """Writes rollouts, spans and calls into a file each.

    Args:
        open_table: name -> the file of that name, which takes records and is closed.
        tokens: whether calls have their
            token ids and log-probs.
    """

    def __init__(self, open_table: Callable[[str], Any], *, tokens: bool) -> None:
        self._tokens = tokens
        self._files = contextlib.ExitStack()
        self._rollouts, self._spans, self._calls = (
            self._files.enter_context(contextlib.closing(open_table(name))) for name in ("rollouts", "spans", "calls")
        )

    def add(self, record: Record) -> None:
        """Append a rollout."""
        self._rollouts.add(rollout_record(record))
        for span in span_records(record):
            self._spans.add(span)
        for call in call_records(record, tokens=self._tokens):
            self._calls.add(call)

    def close(self) -> None:
        """Finish the files."""
        self._files.close()


def json_lines(folder: Path, *, tokens: bool) -> Tables:
    """Writes `rollouts.jsonl`, `spans.jsonl` and `calls.jsonl`."""
    return Tables(lambda name: _Lines(folder / f"{name}.jsonl"), tokens=tokens)


class _Lines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.close = self._file.close

    def add(self, values: dict[str, Any]) -> None:
        self._file.write(to_json(values) + b"\n")


class JsonTree:
    """Writes `<date>/<agent>/<rollout>.json`: the rollout with its `spans` and `calls`; date of enqueueing, UTC.

    Args:
        folder: of the files.
        tokens: whether calls have their token ids and log-probs.
    """

    def __init__(self, folder: Path, *, tokens: bool) -> None:
        self._folder = folder
        self._tokens = tokens

    def add(self, record: Record) -> None:
        """Write a rollout's file."""
        date = datetime.fromtimestamp(record.rollout.created_at, UTC).strftime("%Y-%m-%d")
        folder = self._folder / date / file_name(record.agent or "unknown")
        folder.mkdir(parents=True, exist_ok=True)
        rollout = {
            **rollout_record(record),
            "spans": span_records(record),
            "calls": call_records(record, tokens=self._tokens),
        }
        (folder / f"{file_name(record.rollout.rollout_id)}.json").write_bytes(to_json(rollout, indent=True) + b"\n")

    def close(self) -> None:
        """No file is open."""


def to_json(value: Any, *, indent: bool = False) -> bytes:
    """`value` as strict JSON in UTF-8: NaN and infinities become null, lone surrogates stay escapes."""
    try:
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
        return orjson.dumps(value, option=options)
    except TypeError:
        # orjson refuses lone surrogates and integers above 64 bits, which are JSON too.
        return json.dumps(_plain(value), allow_nan=False, indent=2 if indent else None).encode()


def _plain(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case np.ndarray():
            return orjson.loads(to_json(value))  # float32 in the shortest unique digits
        case Mapping():
            return {str(k): _plain(v) for k, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
    return value


def file_name(text: str) -> str:
    """A unique name for a file or folder for `text`: characters that no path should have become %XX."""
    safe = re.sub(
        r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff/\\:*?\"<>|%]|^\.|[. ]$",
        lambda m: "".join(f"%{b:02X}" for b in m[0].encode("utf-8", "surrogatepass")),
        text,
    )
    if len(safe.encode()) <= LONGEST_NAME:
        return safe or "%"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return safe.encode()[: LONGEST_NAME - 17].decode(errors="ignore") + f"~{digest}"
