"""Converts the store's dataclasses to table rows (`*_row`) and back (`to_*`), without loss.

Token ids are little-endian int32, log-probs little-endian float32. JSON is text; a tuple comes back as a list.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from agl.errors import StoreError
from agl.mdp.spans import Event, Span
from agl.mdp.types import Call, FloatArray, IntArray
from agl.trainer.store.types import (
    Attempt,
    Metric,
    Mode,
    NewRollout,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    TrainedCall,
    TrainingRun,
)

Row = Mapping[Any, Any]

_IDS = np.dtype("<i4")
_LOGPROBS = np.dtype("<f4")
_SETTABLE = {"status": typing.get_args(RolloutStatus), "mode": typing.get_args(Mode)}
_ESCAPE = "\ufdd0"
"""A noncharacter, which Unicode reserves for use inside of a program."""
_UNSTORABLE = re.compile("[\0\ud800-\udfff\ufdd0]")
_ESCAPED = re.compile("\ufdd0([0-9a-f]{4})")


def dumps(value: Any, what: str, **where: object) -> str:
    """`value` as JSON text.

    Raises:
        StoreError: it is not a JSON value; the message names `what` and the place.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:
        pass
    # orjson refuses lone surrogates, integers above 64 bits and keys that are no strings; `json` accepts all of them.
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"{what} is not a JSON value: {error}",
            hint="use only dicts, lists, strings, numbers, booleans and None in it",
            **where,
        ) from error


def loads(text: str) -> Any:
    """The value of JSON text that `dumps` wrote."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def pack_text(text: str | None) -> str | None:
    """Text as every database can store it: NUL, lone surrogates and U+FDD0 itself become U+FDD0 and four hex digits."""
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return _UNSTORABLE.sub(lambda m: f"{_ESCAPE}{ord(m[0]):04x}", text)


def unpack_text(stored: str | None) -> str | None:
    """The text that `pack_text` packed."""
    if stored is None or _ESCAPE not in stored:
        return stored
    return _ESCAPED.sub(lambda m: chr(int(m[1], 16)), stored)


def pack_ids(ids: IntArray) -> bytes:
    """int32 [n] -> 4n bytes."""
    return np.ascontiguousarray(ids, dtype=_IDS).tobytes()


def unpack_ids(data: bytes) -> IntArray:
    """4n bytes -> int32 [n], read-only."""
    return np.frombuffer(data, dtype=_IDS)


def pack_logprobs(logprobs: FloatArray) -> bytes:
    """float32 [n] -> 4n bytes."""
    return np.ascontiguousarray(logprobs, dtype=_LOGPROBS).tobytes()


def unpack_logprobs(data: bytes) -> FloatArray:
    """4n bytes -> float32 [n], read-only."""
    return np.frombuffer(data, dtype=_LOGPROBS)


def digest(packed: bytes) -> bytes:
    """16 bytes that identify packed token ids: equal digests of equal lengths mean equal ids."""
    return hashlib.blake2b(packed, digest_size=16).digest()


# -- rollouts and attempts ----------------------------------------------------------------------------------------
@functools.lru_cache(256)
def _config_text(config: RolloutConfig) -> str:
    return orjson.dumps(dataclasses.asdict(config)).decode()


@functools.lru_cache(256)
def _config(text: str) -> RolloutConfig:
    fields = orjson.loads(text)
    return RolloutConfig(**{**fields, "retry_on": tuple(fields["retry_on"])})


def rollout_row(new: NewRollout, rollout_id: str, now: float) -> dict[str, Any]:
    """The row of a rollout that is queued at `now` (seconds since the epoch)."""
    config = new.config
    if not isinstance(config.retry_on, tuple):
        # A list cannot be hashed for the cache.
        config = dataclasses.replace(config, retry_on=tuple(config.retry_on))
    return {
        "rollout_id": rollout_id,
        "run_id": new.run_id,
        "step": new.step,
        "mode": new.mode,
        "status": "queuing",
        "group_key": pack_text(new.group),
        "position": new.index,
        "seed": new.seed,
        "resources_id": new.resources_id,
        "priority": new.priority,
        "attempts": 0,
        "task": dumps(new.task, "the task", rollout=rollout_id),
        "config": _config_text(config),
        "metadata": dumps(dict(new.metadata), "the metadata", rollout=rollout_id),
        "created_at": now if new.created_at is None else new.created_at,
        "ended_at": None,
    }


def rollout_columns(rollout_id: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of fields of a rollout that are set.

    Raises:
        StoreError: a field that cannot be set, or a value that it cannot have.
    """
    columns: dict[str, Any] = {}
    for name, value in values.items():
        if name in ("task", "metadata"):
            columns[name] = dumps(value, f"the {name}", rollout=rollout_id)
        elif name == "config":
            config = value if isinstance(value, RolloutConfig) else RolloutConfig(**value)
            columns[name] = _config_text(dataclasses.replace(config, retry_on=tuple(config.retry_on)))
        elif name == "resources_id" or value in _SETTABLE.get(name, ()):
            columns[name] = value
        else:
            raise StoreError(f"a rollout's {name} cannot become {value!r}", rollout=rollout_id)
    return columns


def to_rollout(row: Row) -> Rollout:
    """A row of `schema.rollouts`."""
    return Rollout(
        rollout_id=row["rollout_id"],
        task=loads(row["task"]),
        status=row["status"],
        mode=row["mode"],
        run_id=row["run_id"],
        step=row["step"],
        group=unpack_text(row["group_key"]) or "",
        index=row["position"],
        seed=row["seed"],
        resources_id=row["resources_id"],
        priority=row["priority"],
        config=_config(row["config"]),
        metadata=loads(row["metadata"]),
        attempts=row["attempts"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )


def secret_hash(secret: str) -> bytes:
    """32 bytes: SHA-256 of the secret of a lease, which is random."""
    return hashlib.sha256(secret.encode(errors="backslashreplace")).digest()


def attempt_row(attempt: Attempt, config: RolloutConfig, request_id: str | None, secret: str) -> dict[str, Any]:
    """The row of an attempt, with its rollout's configuration, the request that leased it and its secret's hash."""
    return {
        "rollout_id": attempt.rollout_id,
        "attempt": attempt.attempt,
        "status": attempt.status,
        "worker_id": attempt.worker_id,
        "error": pack_text(attempt.error),
        "timeout_seconds": config.timeout_seconds,
        "unresponsive_seconds": config.unresponsive_seconds,
        "started_at": attempt.started_at,
        "last_heartbeat_at": attempt.last_heartbeat_at,
        "ended_at": attempt.ended_at,
        "request_id": request_id,
        "secret_hash": secret_hash(secret),
    }


def to_attempt(row: Row) -> Attempt:
    """A row of `schema.attempts`."""
    return Attempt(
        rollout_id=row["rollout_id"],
        attempt=row["attempt"],
        status=row["status"],
        worker_id=row["worker_id"],
        error=unpack_text(row["error"]),
        started_at=row["started_at"],
        last_heartbeat_at=row["last_heartbeat_at"],
        ended_at=row["ended_at"],
    )


# -- calls and spans ----------------------------------------------------------------------------------------------
def call_row(call: Call) -> dict[str, Any]:
    """The row of a call with its complete prompt (`shared` 0)."""
    where = {"rollout": call.rollout_id, "attempt": call.attempt, "call": call.id}
    prompt, response = pack_ids(call.prompt_ids), pack_ids(call.response_ids)
    return {
        "id": call.id,
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "position": call.index,
        "agent": pack_text(call.agent),
        "policy": pack_text(call.policy),
        "policy_version": call.policy_version,
        "shared": 0,
        "prompt": prompt,
        "response": response,
        "logprobs": pack_logprobs(call.logprobs),
        "length": call.prompt_ids.size + call.response_ids.size,
        "digest": digest(prompt + response),
        "temperature": call.temperature,
        "finish_reason": call.finish_reason,
        "parent_id": call.parent_id,
        "fork_cause": pack_text(call.fork_cause),
        "tool_call_ids": dumps(call.tool_call_ids, "tool_call_ids", **where),
        "span_id": call.span_id,
        "request": dumps(dict(call.request), "the request", **where),
        "answer": dumps(dict(call.response), "the response", **where),
        "error": pack_text(call.error),
        "started_at": call.started_at,
        "ended_at": call.ended_at,
    }


def to_call(row: Row, prompt: bytes) -> Call:
    """A row of `schema.calls` with its complete packed prompt."""
    return Call(
        id=row["id"],
        rollout_id=row["rollout_id"],
        attempt=row["attempt"],
        index=row["position"],
        agent=unpack_text(row["agent"]) or "",
        policy=unpack_text(row["policy"]),
        policy_version=row["policy_version"],
        prompt_ids=unpack_ids(prompt),
        response_ids=unpack_ids(row["response"]),
        logprobs=unpack_logprobs(row["logprobs"]),
        temperature=row["temperature"],
        finish_reason=row["finish_reason"],
        parent_id=row["parent_id"],
        fork_cause=unpack_text(row["fork_cause"]),
        tool_call_ids=tuple(loads(row["tool_call_ids"])),
        span_id=row["span_id"],
        request=loads(row["request"]),
        response=loads(row["answer"]),
        error=unpack_text(row["error"]),
        started_at=row["started_at"],
        ended_at=row["ended_at"],
    )


def span_row(span: Span) -> dict[str, Any]:
    """The row of a span."""
    where = {"rollout": span.rollout_id, "attempt": span.attempt, "span": span.span_id}
    events = [{"name": e.name, "time": e.time, "attributes": dict(e.attributes)} for e in span.events]
    return {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "rollout_id": span.rollout_id,
        "attempt": span.attempt,
        "name": pack_text(span.name),
        "started_at": span.start,
        "ended_at": span.end,
        "status": span.status,
        "status_message": pack_text(span.status_message),
        "attributes": dumps(dict(span.attributes), "a span's attributes", **where),
        "events": dumps(events, "a span's events", **where) if events else "[]",
    }


def to_span(row: Sequence[Any]) -> Span:
    """A row of `schema.spans`, whose columns are in the order of the span's fields."""
    *ids, name, start, end, status, message, attributes, events = row
    event_list = tuple(Event(**event) for event in loads(events)) if events != "[]" else ()
    fields: list[Any] = [*ids, unpack_text(name), start, end, status, unpack_text(message)]
    return Span(*fields, attributes=loads(attributes), events=event_list)


# -- training -----------------------------------------------------------------------------------------------------
def trained_row(run_id: str, trained: TrainedCall) -> dict[str, Any]:
    """The row of a training record of a run."""
    fields = dataclasses.asdict(trained)
    return {"run_id": run_id, "return_value": fields.pop("return_"), **fields}


def to_trained(row: Row) -> TrainedCall:
    """A row of `schema.trained_calls`."""
    fields = {k: v for k, v in row.items() if k not in ("run_id", "return_value")}
    return TrainedCall(return_=row["return_value"], **fields)


# -- runs ---------------------------------------------------------------------------------------------------------
def run_row(run: TrainingRun, now: float) -> dict[str, Any]:
    """The row of a run that is written at `now` (seconds since the epoch), which is when it began if it does not say.

    Raises:
        StoreError: its settings are not JSON values.
    """
    return {
        "run_id": run.run_id,
        "name": pack_text(run.name),
        "algorithm": pack_text(run.algorithm),
        "status": run.status,
        "error": pack_text(run.error),
        "config": dumps(dict(run.config), "the settings", run=run.run_id),
        "directory": pack_text(run.directory),
        "step": run.step,
        "steps": run.steps,
        "created_at": run.created_at or now,
        "updated_at": now,
        "ended_at": run.ended_at,
    }


def to_run(row: Row) -> TrainingRun:
    """A row of `schema.runs`."""
    texts = {name: unpack_text(row[name]) for name in ("name", "algorithm", "error", "directory")}
    return TrainingRun(**{**row, **texts, "config": loads(row["config"])})


def metric_rows(run_id: str, step: int, values: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """The rows of a step's metrics; a value that is not finite is NULL.

    Raises:
        StoreError: a value is not a number.
    """
    rows = []
    for name, value in values.items():
        try:
            finite = None if value is None or not math.isfinite(value) else float(value)
        except (TypeError, OverflowError):
            raise StoreError(f"the metric {name!r} is not a number: {value!r}", run=run_id, step=step) from None
        rows.append({"run_id": run_id, "step": step, "name": pack_text(name), "value": finite})
    return rows


def to_metric(row: Sequence[Any]) -> Metric:
    """A row of `schema.metrics`, whose columns are in the order of the metric's fields."""
    run_id, step, name, value = row
    return Metric(run_id, step, unpack_text(name) or "", value)
