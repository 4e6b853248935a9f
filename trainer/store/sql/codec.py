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
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

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

if TYPE_CHECKING:
    from sqlalchemy import Column

Row = Mapping[Any, Any]
D = TypeVar("D")
T = TypeVar("T", str, str | None)

KEY_BYTES = 1200
"""The longest id or name that is in an index, in UTF-8: an entry of PostgreSQL's holds two of them."""

LATEST = 253_402_300_799.0
"""The last second that a calendar of four-digit years has, since the epoch."""

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
    """The value of JSON text that `dumps` wrote.

    Raises:
        StoreError: it is something else.
    """
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError):
        pass
    # orjson refuses what only `json` writes.
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise not_ours(text, "JSON") from error


def not_ours(value: Any, what: str, **where: object) -> StoreError:
    """The error of a stored value that agl did not write; `what` was expected at the place `where`."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]} ..."
    return StoreError(
        f"the store holds what agl did not write: {shown} instead of {what}",
        hint="it is damaged, or was changed by another program; use a copy of before that",
        **where,
    )


def dictionary(text: str) -> dict[str, Any]:
    """The JSON object of text that `dumps` wrote. Raises `StoreError` as `loads` does."""
    value = loads(text)
    if not isinstance(value, dict):
        raise not_ours(text, "a JSON object")
    return value


def array(text: str) -> list[Any]:
    """The JSON array of text that `dumps` wrote. Raises `StoreError` as `loads` does."""
    value = loads(text)
    if not isinstance(value, list):
        raise not_ours(text, "a JSON array")
    return value


def strings(text: str) -> tuple[str, ...]:
    """The JSON array of strings of text that `dumps` wrote. Raises `StoreError` as `loads` does."""
    values = array(text)
    if not all(isinstance(value, str) for value in values):
        raise not_ours(text, "a JSON array of strings")
    return tuple(values)


def pack_text(text: str | None) -> str | None:
    """Text as every database can store it: NUL, lone surrogates and U+FDD0 itself become U+FDD0 and four hex digits."""
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return _UNSTORABLE.sub(lambda m: f"{_ESCAPE}{ord(m[0]):04x}", text)


def key(text: T, what: str, **where: object) -> T:
    """An id or a name that the databases index, or None.

    Raises:
        StoreError: it is longer than an entry of PostgreSQL's indexes can be; the message names `what` and the place.
    """
    if text is not None and len(text) > KEY_BYTES // 4 and len(text.encode(errors="surrogatepass")) > KEY_BYTES:
        n = len(text.encode(errors="surrogatepass"))
        raise StoreError(
            f"{what} is {n} bytes long: {text[:40]!r} ...", hint=f"it can have at most {KEY_BYTES} bytes", **where
        )
    return text


def is_time(seconds: float) -> bool:
    """Whether the number is seconds since the epoch of a four-digit year, from 1970 on."""
    return 0 <= seconds <= LATEST


def require_time(seconds: float, what: str, **where: object) -> None:
    """Raises `StoreError` for a number that `is_time` denies; the message names `what` and the place `where`."""
    if not is_time(seconds):
        raise StoreError(f"{what} is {seconds!r}", hint="give seconds since the epoch", **where)


def unpack_text(stored: str | None) -> str | None:
    """The text that `pack_text` packed."""
    if stored is None or _ESCAPE not in stored:
        return stored
    return _ESCAPED.sub(lambda m: chr(int(m[1], 16)), stored)


def pack_ids(ids: IntArray) -> bytes:
    """int32 [n] -> 4n bytes."""
    return np.ascontiguousarray(ids, dtype=_IDS).tobytes()


def unpack_ids(data: bytes) -> IntArray:
    """4n bytes -> int32 [n], read-only. Raises `StoreError` for another number of bytes."""
    if len(data) % _IDS.itemsize:
        raise not_ours(data, f"a multiple of {_IDS.itemsize} bytes")
    return np.frombuffer(data, dtype=_IDS)


def pack_logprobs(logprobs: FloatArray) -> bytes:
    """float32 [n] -> 4n bytes."""
    return np.ascontiguousarray(logprobs, dtype=_LOGPROBS).tobytes()


def unpack_logprobs(data: bytes) -> FloatArray:
    """4n bytes -> float32 [n], read-only. Raises `StoreError` for another number of bytes."""
    if len(data) % _LOGPROBS.itemsize:
        raise not_ours(data, f"a multiple of {_LOGPROBS.itemsize} bytes")
    return np.frombuffer(data, dtype=_LOGPROBS)


def digest(packed: bytes) -> bytes:
    """16 bytes that identify packed token ids: equal digests of equal lengths mean equal ids."""
    return hashlib.blake2b(packed, digest_size=16).digest()


class Kinds:
    """Checks that values of rows have the types of their columns, which SQLite itself does not see to.

    Args:
        table: the name of the table.
        columns: names, in the order of the values; None for all.
    """

    def __init__(self, table: str, columns: Sequence[str] | None = None) -> None:
        self._table = table
        self._names = columns
        self._good: set[tuple[type, ...]] = set()

    @functools.cached_property
    def _columns(self) -> list[Column[Any]]:
        # Who sends rows to a server, and reads none, need not have a database's library.
        from agl.trainer.store.sql import schema

        columns = schema.metadata.tables[self._table].c
        return [*columns] if self._names is None else [columns[name] for name in self._names]

    @functools.cached_property
    def _allowed(self) -> list[set[type]]:
        """The types of each column's values."""
        return [{column.type.python_type, *([type(None)] if column.nullable else [])} for column in self._columns]

    @functools.cached_property
    def _times(self) -> list[int]:
        """The columns, by number, that hold times."""
        return [i for i, column in enumerate(self._columns) if column.name.endswith("_at")]

    def check(self, values: Sequence[Any]) -> None:
        """Raises `StoreError` with the table and column of a value that has another type, or is no time of a clock."""
        kinds = tuple(map(type, values))
        if kinds not in self._good:
            self._check_types(values)
            self._good.add(kinds)
        for i in self._times:
            if values[i] is not None and not is_time(values[i]):
                raise not_ours(values[i], "seconds since the epoch", column=_name(self._columns[i]))

    def _check_types(self, values: Sequence[Any]) -> None:
        for column, value, allowed in zip(self._columns, values, self._allowed, strict=True):
            if type(value) not in allowed:
                raise not_ours(value, column.type.python_type.__name__, column=_name(column))


def _name(column: Column[Any]) -> str:
    return f"{column.table.name}.{column.name}"


class Columns(Generic[D]):
    """A dataclass as a row of a table: each field is a column of the same name, except as the arguments say.

    Args:
        of: the dataclass.
        table: the name of its table.
        renamed: field -> column.
        texts: fields that hold any text.
        json: fields that hold JSON values -> what an error calls them.
        packed: field -> (to the column, and back).
        keys: fields that are in an index.
    """

    def __init__(
        self,
        of: type[D],
        table: str,
        *,
        renamed: Mapping[str, str] | None = None,
        texts: Sequence[str] = (),
        json: Mapping[str, str] | None = None,
        packed: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        fields = [field.name for field in dataclasses.fields(of)]  # type: ignore[arg-type]
        self._of, self._columns = of, [(renamed or {}).get(field, field) for field in fields]
        self._of_value, self._of_row = attrgetter(*fields), itemgetter(*self._columns)
        converted = {**dict.fromkeys(texts, (pack_text, unpack_text)), **(packed or {})}
        self._pack = [(fields.index(field), pack) for field, (pack, _) in converted.items()]
        self._json = [(fields.index(field), what) for field, what in (json or {}).items()]
        self._keys = [(fields.index(field), field) for field in keys]
        hints = typing.get_type_hints(of)
        unpack = {field: read for field, (_, read) in converted.items()}
        unpack |= {field: loads if hints[field] is Any else dictionary for field in json or {}}
        self._unpack = [(fields.index(field), read) for field, read in unpack.items()]
        self._kinds = Kinds(table, self._columns)
        self._times = [(i, fields[i]) for i, column in enumerate(self._columns) if column.endswith("_at")]
        choices = {field: typing.get_args(hint) for field, hint in hints.items() if typing.get_origin(hint) is Literal}
        self._choices = [(fields.index(field), field, values) for field, values in choices.items()]

    def row(self, value: D, **where: object) -> dict[str, Any]:
        """The row of a value.

        Raises:
            StoreError: a field is no JSON value, no time, or too long for an index; the message names `where`.
        """
        values = list(self._of_value(value))
        for i, field in self._times:
            if values[i] is not None:
                require_time(values[i], field, **where)
        for i, field in self._keys:
            key(values[i], field, **where)
        for i, pack in self._pack:
            values[i] = pack(values[i])
        for i, what in self._json:
            values[i] = dumps(dict(values[i]) if isinstance(values[i], Mapping) else values[i], what, **where)
        return dict(zip(self._columns, values, strict=True))

    def read(self, row: Row) -> D:
        """The value of a row, which may have further columns. Raises `StoreError` for a row that agl did not write."""
        values = list(self._of_row(row))
        self._kinds.check(values)
        for i, field, allowed in self._choices:
            if values[i] not in allowed:
                raise not_ours(values[i], f"a {field}, which is one of {', '.join(allowed)}")
        for i, unpack in self._unpack:
            values[i] = unpack(values[i])
        return self._of(*values)


# -- rollouts and attempts ----------------------------------------------------------------------------------------
@functools.lru_cache(256)
def _config_text(config: RolloutConfig) -> str:
    return orjson.dumps(dataclasses.asdict(config)).decode()


@functools.lru_cache(256)
def _config(text: str) -> RolloutConfig:
    fields = dictionary(text)
    try:
        return RolloutConfig(**{**fields, "retry_on": tuple(fields["retry_on"])})
    except (KeyError, TypeError) as error:
        raise not_ours(text, "the settings of a rollout") from error


def _hashable(config: RolloutConfig) -> RolloutConfig:
    """The configuration with a tuple: a list cannot be hashed for the cache."""
    if isinstance(config.retry_on, tuple):
        return config
    return dataclasses.replace(config, retry_on=tuple(config.retry_on))


_ROLLOUT: Mapping[str, Any] = {
    "renamed": {"group": "group_key", "index": "position"},
    "texts": ("group",),
    "json": {"task": "the task", "metadata": "the metadata"},
    "packed": {"config": (lambda config: _config_text(_hashable(config)), _config)},
}
_NEW_ROLLOUT = Columns(NewRollout, "rollouts", **_ROLLOUT, keys=("rollout_id", "run_id", "resources_id"))
_STORED_ROLLOUT = Columns(Rollout, "rollouts", **_ROLLOUT)
_ATTEMPT = Columns(Attempt, "attempts", texts=("error",), keys=("rollout_id",))
to_rollout = _STORED_ROLLOUT.read
to_attempt = _ATTEMPT.read


def rollout_row(new: NewRollout, rollout_id: str, now: float) -> dict[str, Any]:
    """The row of a rollout that is queued at `now` (seconds since the epoch)."""
    row = _NEW_ROLLOUT.row(new, rollout=rollout_id)
    created_at = now if new.created_at is None else new.created_at
    status = {"status": "queuing", "attempts": 0, "created_at": created_at, "ended_at": None}
    return {**row, "rollout_id": rollout_id, **status}


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
            columns[name] = _config_text(_hashable(config))
        elif name == "resources_id" or value in _SETTABLE.get(name, ()):
            columns[name] = value
        else:
            raise StoreError(f"a rollout's {name} cannot become {value!r}", rollout=rollout_id)
    return columns


def secret_hash(secret: str) -> bytes:
    """32 bytes: SHA-256 of the secret of a lease, which is random."""
    return hashlib.sha256(secret.encode(errors="backslashreplace")).digest()


def attempt_row(attempt: Attempt, config: RolloutConfig, request_id: str | None, secret: str) -> dict[str, Any]:
    """The row of an attempt, with its rollout's configuration, the request that leased it and its secret's hash."""
    limits = {"timeout_seconds": config.timeout_seconds, "unresponsive_seconds": config.unresponsive_seconds}
    request = key(request_id, "request_id", rollout=attempt.rollout_id)
    return {**_ATTEMPT.row(attempt), **limits, "request_id": request, "secret_hash": secret_hash(secret)}


# -- calls and spans ----------------------------------------------------------------------------------------------
_CALL = Columns(
    Call,
    "calls",
    renamed={"index": "position", "prompt_ids": "prompt", "response_ids": "response", "response": "answer"},
    texts=("agent", "policy", "fork_cause", "error"),
    keys=("id", "rollout_id"),
    json={"request": "the request", "response": "the response"},
    packed={
        "prompt_ids": (pack_ids, unpack_ids),
        "response_ids": (pack_ids, unpack_ids),
        "logprobs": (pack_logprobs, unpack_logprobs),
        "tool_call_ids": (lambda ids: dumps(ids, "tool_call_ids"), strings),
    },
)


def call_row(call: Call) -> dict[str, Any]:
    """The row of a call with its complete prompt (`shared` 0)."""
    row = _CALL.row(call, rollout=call.rollout_id, attempt=call.attempt, call=call.id)
    tokens = row["prompt"] + row["response"]
    return {**row, "shared": 0, "length": len(tokens) // _IDS.itemsize, "digest": digest(tokens)}


def to_call(row: Row, prompt: bytes) -> Call:
    """A row of `schema.calls` with its complete packed prompt."""
    call = _CALL.read({**row, "prompt": prompt})
    for name in ("messages", "tools"):
        _require_objects(call.request.get(name), f"the {name} of a request", call)
    _require_objects(call.response.get("tool_calls"), "the tool calls of an answer", call)
    for tool_call in call.response.get("tool_calls") or ():
        function = tool_call.get("function")
        is_object = isinstance(function, dict)
        if not (is_object and isinstance(function.get("name"), str) and "arguments" in function):
            raise not_ours(tool_call, "a tool call of an answer", rollout=call.rollout_id, call=call.id)
    return call


def _require_objects(value: Any, what: str, call: Call) -> None:
    """Refuse what is neither a list of objects nor left out.

    Raises:
        StoreError: it is.
    """
    if value is not None and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        raise not_ours(value, what, rollout=call.rollout_id, call=call.id)


_SPAN_KINDS = Kinds("spans")


def span_row(span: Span) -> dict[str, Any]:
    """The row of a span."""
    where = {"rollout": span.rollout_id, "attempt": span.attempt, "span": span.span_id}
    require_time(span.start, "the start of a span", **where)
    require_time(span.end, "the end of a span", **where)
    events = [{"name": e.name, "time": e.time, "attributes": dict(e.attributes)} for e in span.events]
    return {
        "trace_id": key(span.trace_id, "trace_id", **where),
        "span_id": key(span.span_id, "span_id", **where),
        "parent_id": span.parent_id,
        "rollout_id": key(span.rollout_id, "rollout_id", **where),
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
    _SPAN_KINDS.check(row)
    *ids, name, start, end, status, message, attributes, events = row
    event_list = _events(events) if events != "[]" else ()
    fields: list[Any] = [*ids, unpack_text(name), start, end, status, unpack_text(message)]
    return Span(*fields, attributes=dictionary(attributes), events=event_list)


def _events(text: str) -> tuple[Event, ...]:
    try:
        events = tuple(Event(**event) for event in array(text))
    except TypeError as error:
        raise not_ours(text, "a span's events") from error
    for event in events:
        is_timed = isinstance(event.time, int | float)
        if not (is_timed and isinstance(event.name, str) and isinstance(event.attributes, dict)):
            raise not_ours(text, "a span's events")
    return events


# -- training -----------------------------------------------------------------------------------------------------
_TRAINED = Columns(TrainedCall, "trained_calls", renamed={"return_": "return_value"}, keys=("call_id", "rollout_id"))
to_trained = _TRAINED.read


def trained_row(run_id: str, trained: TrainedCall) -> dict[str, Any]:
    """The row of a training record of a run."""
    return {"run_id": key(run_id, "run_id"), **_TRAINED.row(trained)}


# -- runs ---------------------------------------------------------------------------------------------------------
_RUN = Columns(
    TrainingRun,
    "runs",
    texts=("name", "algorithm", "error", "directory"),
    json={"config": "the settings"},
    keys=("run_id",),
)
to_run = _RUN.read


def run_row(run: TrainingRun, now: float) -> dict[str, Any]:
    """The row of a run that is written at `now` (seconds since the epoch), which is when it began if it does not say.

    Raises:
        StoreError: its settings are not JSON values.
    """
    return {**_RUN.row(run, run=run.run_id), "created_at": run.created_at or now, "updated_at": now}


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
        stored = key(pack_text(name), "the name of a metric", run=run_id, step=step)
        rows.append({"run_id": run_id, "step": step, "name": stored, "value": finite})
    return rows


_METRIC_KINDS = Kinds("metrics")


def to_metric(row: Sequence[Any]) -> Metric:
    """A row of `schema.metrics`, whose columns are in the order of the metric's fields."""
    _METRIC_KINDS.check(row)
    run_id, step, name, value = row
    return Metric(run_id, step, unpack_text(name) or "", value)
