"""Calls, spans, resources and training records, as functions of a connection. Repeating a write is harmless.

Of a prompt that continues its parent call only the suffix is stored, so a rollout of T turns takes O(T) bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Table, Text, bindparam, select, update

from agl.mdp.order import in_order
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.trainer.store.sql import codec, statements
from agl.trainer.store.sql.dialect import insert
from agl.trainer.store.sql.schema import calls as C
from agl.trainer.store.sql.schema import notes as N
from agl.trainer.store.sql.schema import policy_versions as P
from agl.trainer.store.sql.schema import resources as V
from agl.trainer.store.sql.schema import spans as S
from agl.trainer.store.sql.schema import trained_calls as T
from agl.trainer.store.types import TrainedCall

TOKEN_BYTES = 4
_HEAD: Any = select(C.c.id, C.c.rollout_id, C.c.attempt, C.c.length, C.c.digest).where(C.c.id == bindparam("id"))
_INSERT_CALL = insert(C).on_conflict_do_nothing()
_MARK_CALL = (
    update(C)
    .where(C.c.id == bindparam("lost"), C.c.error.is_(None))
    .values(finish_reason=bindparam("reason", type_=Text), error=bindparam("why", type_=Text))
)
_INSERT_SPAN = insert(S).on_conflict_do_nothing()
_SPANS = select(S).where(S.c.rollout_id == bindparam("id"))
_SPANS_OF_ATTEMPT = _SPANS.where(S.c.attempt == bindparam("n"))
_INSERT_RESOURCES = insert(V).on_conflict_do_nothing()


def upsert(table: Table, columns: Sequence[str], key: Sequence[str] | None = None) -> Any:
    """An insert that sets `columns` where a row with the key exists: that of these columns, or else the primary one."""
    statement = insert(table)
    return statement.on_conflict_do_update(
        index_elements=list(key or table.primary_key.columns), set_={name: statement.excluded[name] for name in columns}
    )


_UPSERT_NOTE = upsert(N, ["value"])
_UPSERT_VERSION = upsert(P, ["checkpoint"])
_UPSERT_TRAINED = upsert(T, [column.name for column in T.columns if not column.primary_key])


# -- calls --------------------------------------------------------------------------------------------------------
def add_calls(connection: Connection, each: Sequence[Sequence[Call]]) -> list[None]:
    """Insert calls, and mark those that are stored and have turned out to be lost.

    Where the parent is of the same attempt and a prefix of the prompt, that prefix is left out.
    """
    calls = [call for calls in each for call in calls]
    known: dict[str, Mapping[Any, Any]] = {}
    ids = {call.id for call in calls} | {call.parent_id for call in calls if call.parent_id}
    heads = statements.first_each(connection, _HEAD, [{"id": call_id} for call_id in sorted(ids)])
    known.update((head["id"], head) for head in heads if head is not None)
    new = []
    lost = []
    for call in calls:
        if call.id in known:
            if call.finish_reason == "cancelled":
                row = codec.call_row(call)
                lost.append({"lost": row["id"], "reason": row["finish_reason"], "why": row["error"]})
            continue
        row = codec.call_row(call)
        parent = known.get(call.parent_id) if call.parent_id else None
        if parent is not None and _continues(row, parent):
            row["shared"] = parent["length"]
            row["prompt"] = row["prompt"][parent["length"] * TOKEN_BYTES :]
        known[call.id] = row
        new.append(row)
    statements.change_many(connection, _INSERT_CALL, new)
    statements.change_many(connection, _MARK_CALL, lost)
    return [None] * len(each)


def _continues(row: Mapping[Any, Any], parent: Mapping[Any, Any]) -> bool:
    """Whether the complete prompt of the row begins with the parent's prompt + response, token for token."""
    if (row["rollout_id"], row["attempt"]) != (parent["rollout_id"], parent["attempt"]):
        return False
    head = row["prompt"][: parent["length"] * TOKEN_BYTES]
    return len(head) == parent["length"] * TOKEN_BYTES and codec.digest(head) == parent["digest"]


_OF_PROMPTS = ("id", "parent_id", "shared", "prompt", "response")
_PROMPT_KINDS = codec.Kinds("calls", _OF_PROMPTS)


def query_calls(connection: Connection, rollout_id: str, attempt: int | None) -> list[Call]:
    """A rollout's calls with complete prompts, by attempt and index."""
    statement = select(C).where(C.c.rollout_id == rollout_id).order_by(C.c.seq)
    if attempt is not None:
        statement = statement.where(C.c.attempt == attempt)
    # In order of insertion, so that a parent comes before its children.
    whole: dict[str, bytes] = {}
    calls = []
    for row in connection.execute(statement).mappings():
        _PROMPT_KINDS.check([row[name] for name in _OF_PROMPTS])
        prompt = row["prompt"]
        if row["shared"]:
            if row["parent_id"] not in whole:
                raise codec.not_ours(row["parent_id"], "the id of a call before it", call=row["id"])
            prompt = whole[row["parent_id"]] + prompt
        whole[row["id"]] = prompt + row["response"]
        calls.append(codec.to_call(row, prompt))
    return sorted(calls, key=lambda call: (call.attempt, call.index))


# -- spans --------------------------------------------------------------------------------------------------------
def add_spans(connection: Connection, each: Sequence[Sequence[Span]]) -> list[None]:
    """Insert spans that are not stored yet."""
    statements.change_many(connection, _INSERT_SPAN, [codec.span_row(span) for spans in each for span in spans])
    return [None] * len(each)


def move_spans(connection: Connection, rollout_id: str, to_rollout_id: str, to_attempt: int) -> None:
    """Assign all spans of a rollout to an attempt of another one."""
    codec.key(to_rollout_id, "to_rollout_id")
    moved = update(S).where(S.c.rollout_id == rollout_id)
    connection.execute(moved.values(rollout_id=to_rollout_id, attempt=to_attempt))


def query_spans(connection: Connection, attempts: Sequence[tuple[str, int | None]]) -> list[list[Span]]:
    """The spans of rollouts (id, attempt or None for all), in the order in which they began."""
    spans: dict[tuple[str, int | None], list[Span]] = {}
    for rollout_id, n in attempts:
        rows = connection.execute(_SPANS if n is None else _SPANS_OF_ATTEMPT, {"id": rollout_id, "n": n})
        # The database would copy whole rows to sort them.
        spans[rollout_id, n] = in_order(map(codec.to_span, rows))
    return [spans[key] for key in attempts]


# -- resources, policies, training --------------------------------------------------------------------------------
def add_resources(connection: Connection, resources_id: str, resources: Mapping[str, Any], now: float) -> str:
    """Insert a version unless it exists; returns its id."""
    text = codec.dumps(dict(resources), "the resources")
    codec.key(resources_id, "resources_id")
    connection.execute(_INSERT_RESOURCES, {"resources_id": resources_id, "resources": text, "created_at": now})
    return resources_id


def get_resources(connection: Connection, resources_id: str | None) -> tuple[str, Mapping[str, Any]] | None:
    """That version or the latest one; None without any."""
    statement = select(V.c.resources_id, V.c.resources).order_by(V.c.seq.desc()).limit(1)
    if resources_id is not None:
        statement = statement.where(V.c.resources_id == resources_id)
    row = connection.execute(statement).first()
    return None if row is None else (row[0], codec.dictionary(row[1]))


def query_resources(connection: Connection, prefix: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(id, resources) of the versions whose ids begin with `prefix`, oldest first."""
    rows = connection.execute(
        select(V.c.resources_id, V.c.resources).where(begins_with(V.c.resources_id, prefix)).order_by(V.c.seq)
    )
    return [(resources_id, codec.dictionary(text)) for resources_id, text in rows]


def begins_with(column: Column[Any], prefix: str) -> ColumnElement[bool]:
    """A range of the index; both databases compare ids by their bytes."""
    return (column >= prefix) & (column <= prefix + "\U0010ffff")


def put_note(connection: Connection, key: str, value: Any) -> None:
    """Insert or replace a note."""
    codec.key(key, "the key of a note")
    connection.execute(_UPSERT_NOTE, {"key": key, "value": codec.dumps(value, "the note", key=key)})


def query_notes(connection: Connection, prefix: str) -> dict[str, Any]:
    """The notes whose keys begin with `prefix`."""
    rows = connection.execute(select(N.c.key, N.c.value).where(begins_with(N.c.key, prefix)).order_by(N.c.key))
    return {key: codec.loads(text) for key, text in rows}


def add_policy_version(connection: Connection, row: Mapping[str, Any]) -> None:
    """Insert a version of a policy, or set the checkpoint of an existing one."""
    for name in ("run_id", "policy"):
        codec.key(row[name], name)
    connection.execute(_UPSERT_VERSION, dict(row))


def add_trained(connection: Connection, run_id: str, rows: Sequence[TrainedCall]) -> None:
    """Insert or replace the training records of calls."""
    if rows:
        connection.execute(_UPSERT_TRAINED, [codec.trained_row(run_id, row) for row in rows])


def query_trained(connection: Connection, rollout_id: str) -> list[TrainedCall]:
    """The training records of a rollout's calls, by step."""
    statement = select(T).where(T.c.rollout_id == rollout_id).order_by(T.c.step, T.c.sequence, T.c.call_id)
    return [codec.to_trained(row) for row in connection.execute(statement).mappings()]
