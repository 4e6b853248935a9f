"""Rollouts as Parquet: `rollouts.parquet`, `spans.parquet`, `calls.parquet`.

Tasks, metadata, attributes and messages have no fixed shape and are JSON text. Token ids and log-probs are lists of
int32 and float32, in which NaN stays NaN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from agl.extras import missing
from agl.trainer.report.export.json_files import Tables, to_json

ROWS = 5000
BYTES = 16 << 20
"""Maximum size of a row group, in rows and in approximate bytes."""


def parquet(folder: Path, *, tokens: bool) -> Tables:
    """Writes the three files.

    Args:
        folder: of the files.
        tokens: whether calls have their token ids and log-probs.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise missing("a Parquet file", "pyarrow", "export") from None
    fields = {"rollouts": _rollouts(), "spans": _spans(), "calls": _calls(tokens)}
    return Tables(lambda name: _Table(folder / f"{name}.parquet", fields[name]), tokens=tokens)


class _Table:
    """A Parquet file, written in row groups. Columns of the type `JSON` take any JSON value."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._fields = fields
        self._schema = pa.schema([(name, pa.string() if kind is JSON else kind) for name, kind in fields.items()])
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def add(self, values: dict[str, Any]) -> None:
        row = {
            name: to_json(values[name]).decode() if kind is JSON else _utf8(values[name])
            for name, kind in self._fields.items()
        }
        self._rows.append(row)
        self._bytes += sum(_size(v) for v in row.values())
        if len(self._rows) >= ROWS or self._bytes >= BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []
        self._bytes = 0

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()


JSON = object()
"""A column of JSON text."""


def _rollouts() -> dict[str, Any]:
    import pyarrow as pa

    text = pa.string()
    whole = pa.int64()
    real = pa.float64()
    yes = pa.bool_()
    attempt = {
        "attempt": whole,
        "status": text,
        "worker_id": text,
        "error": text,
        "started_at": real,
        "last_heartbeat_at": real,
        "ended_at": real,
    }
    reward = {
        "attempt": whole,
        "call_id": text,
        "name": text,
        "value": real,
        "source": text,
        "span_id": text,
        "primary": yes,
        "agent": text,
    }
    trained = {
        "call_id": text,
        "step": whole,
        "policy_version": whole,
        "sequence": whole,
        "reward": real,
        "return": real,
        "advantage": real,
        "tokens": whole,
        "dropped": text,
    }
    return {
        "rollout_id": text,
        "run_id": text,
        "step": whole,
        "mode": text,
        "status": text,
        "group": text,
        "index": whole,
        "seed": whole,
        "resources_id": text,
        "priority": whole,
        "agent": text,
        "reward": real,
        "task": JSON,
        "config": JSON,
        "metadata": JSON,
        "created_at": real,
        "ended_at": real,
        "rewards": pa.list_(pa.struct(list(reward.items()))),
        "attempts": pa.list_(pa.struct(list(attempt.items()))),
        "trained": pa.list_(pa.struct(list(trained.items()))),
    }


def _spans() -> dict[str, Any]:
    import pyarrow as pa

    text = pa.string()
    real = pa.float64()
    return {
        "rollout_id": text,
        "attempt": pa.int64(),
        "trace_id": text,
        "span_id": text,
        "parent_id": text,
        "name": text,
        "start": real,
        "end": real,
        "status": text,
        "status_message": text,
        "attributes": JSON,
        "events": JSON,
    }


def _calls(tokens: bool) -> dict[str, Any]:
    import pyarrow as pa

    text = pa.string()
    whole = pa.int64()
    real = pa.float64()
    ids = pa.list_(pa.int32())
    arrays = {"prompt_ids": ids, "response_ids": ids, "logprobs": pa.list_(pa.float32())} if tokens else {}
    return {
        "rollout_id": text,
        "attempt": whole,
        "index": whole,
        "id": text,
        "agent": text,
        "policy": text,
        "policy_version": whole,
        "temperature": real,
        "finish_reason": text,
        "parent_id": text,
        "fork_cause": text,
        "tool_call_ids": pa.list_(text),
        "span_id": text,
        "request": JSON,
        "response": JSON,
        "error": text,
        "started_at": real,
        "ended_at": real,
        "prompt_tokens": whole,
        "response_tokens": whole,
        **arrays,
    }


def _utf8(value: Any) -> Any:
    """The value with valid UTF-8: lone surrogates become escapes."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {k: _utf8(v) for k, v in value.items()}
        case list() | tuple():
            return [_utf8(v) for v in value]
    return value


def _size(value: Any) -> int:
    match value:
        case str():
            return len(value)
        case np.ndarray():
            return value.nbytes
        case list():
            return 100 * len(value)
    return 8
