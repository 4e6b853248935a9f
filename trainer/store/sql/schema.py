"""The tables of a store, and how a new database gets them.

Portable types only: the same tables serve SQLite and PostgreSQL. JSON is text and token arrays are bytes (`codec`).
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    inspect,
    text,
)

from agl.errors import StoreError, StoreVersionError
from agl.trainer.store.sql.dialect import Dialect

VERSION: Final = "0008"
"""The version of these tables: four digits that only increase, so that versions can be compared."""
VERSION_TABLE: Final = "alembic_version"
"""Where a store says which it has."""

metadata = MetaData()

_Serial = BigInteger().with_variant(Integer, "sqlite")
"""An autoincrementing key, which in SQLite must be of type INTEGER."""

_Id = Text().with_variant(Text(collation="C"), "postgresql")
"""Ids are compared by their bytes, as in SQLite, so that an index finds all ids with a prefix."""

rollouts = Table(
    "rollouts",
    metadata,
    Column("seq", _Serial, primary_key=True),
    Column("rollout_id", _Id, nullable=False, unique=True),
    Column("run_id", _Id),
    Column("step", Integer),
    Column("mode", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("group_key", Text, nullable=False),
    Column("position", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("resources_id", _Id),
    Column("priority", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("task", Text, nullable=False),
    Column("config", Text, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
)
Index("rollouts_queue", rollouts.c.status, rollouts.c.priority.desc(), rollouts.c.seq)
Index(
    "rollouts_run_queue",
    rollouts.c.run_id,
    rollouts.c.priority.desc(),
    rollouts.c.seq,
    sqlite_where=rollouts.c.status == text("'queuing'"),
    postgresql_where=rollouts.c.status == text("'queuing'"),
)
Index("rollouts_run", rollouts.c.run_id, rollouts.c.step)

attempts = Table(
    "attempts",
    metadata,
    Column("rollout_id", _Id, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("status", Text, nullable=False),
    Column("worker_id", _Id),
    Column("error", Text),
    Column("timeout_seconds", Double),
    Column("unresponsive_seconds", Double),
    Column("started_at", Double, nullable=False),
    Column("last_heartbeat_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("request_id", Text),
    Column("secret_hash", LargeBinary),
)
Index("attempts_status", attempts.c.status)
Index("attempts_request", attempts.c.request_id)

calls = Table(
    "calls",
    metadata,
    Column("seq", _Serial, primary_key=True),
    Column("id", _Id, nullable=False, unique=True),
    Column("rollout_id", _Id, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("position", Integer, nullable=False),
    Column("agent", Text, nullable=False),
    Column("policy", Text),
    Column("policy_version", Integer, nullable=False),
    Column("shared", Integer, nullable=False),
    Column("prompt", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("length", Integer, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("temperature", Double, nullable=False),
    Column("finish_reason", Text, nullable=False),
    Column("parent_id", _Id),
    Column("fork_cause", Text),
    Column("tool_call_ids", Text, nullable=False),
    Column("span_id", _Id),
    Column("request", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("error", Text),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double, nullable=False),
)
Index("calls_rollout", calls.c.rollout_id, calls.c.attempt)
# prompt: the prompt's token ids after the first `shared`, which are the parent's prompt + response.
# length, digest: of prompt + response, so that a child is checked against its parent without reading the parent.

spans = Table(
    "spans",
    metadata,
    Column("trace_id", _Id, primary_key=True),
    Column("span_id", _Id, primary_key=True),
    Column("parent_id", _Id),
    Column("rollout_id", _Id, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("status", Text, nullable=False),
    Column("status_message", Text),
    Column("attributes", Text, nullable=False),
    Column("events", Text, nullable=False),
)
Index("spans_rollout", spans.c.rollout_id, spans.c.attempt)

resources = Table(
    "resources",
    metadata,
    Column("seq", _Serial, primary_key=True),
    Column("resources_id", _Id, nullable=False, unique=True),
    Column("resources", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

notes = Table(
    "notes",
    metadata,
    Column("key", _Id, primary_key=True),
    Column("value", Text, nullable=False),
)

memories = Table(
    "memories",
    metadata,
    Column("seq", _Serial, primary_key=True),
    Column("scope", _Id, nullable=False),
    Column("namespace", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("since", Integer, nullable=False),
    Column("until", Integer),
    Column("value", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("reward", Double),
    Column("source", Text),
    Column("embedding", LargeBinary),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
)
Index("memories_scope", memories.c.scope, memories.c.since)
# A version sees the rows with since <= version < until. Rows are added and ended, never changed.

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("run_id", _Id, primary_key=True),
    Column("policy", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False),
    Column("checkpoint", Text),
    Column("created_at", Double, nullable=False),
)

trained_calls = Table(
    "trained_calls",
    metadata,
    Column("run_id", _Id, primary_key=True),
    Column("call_id", _Id, primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("rollout_id", _Id, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("sequence", Integer),
    Column("reward", Double, nullable=False),
    Column("return_value", Double, nullable=False),
    Column("advantage", Double, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("dropped", Text),
)
Index("trained_calls_rollout", trained_calls.c.rollout_id)

runs = Table(
    "runs",
    metadata,
    Column("seq", _Serial, primary_key=True),
    Column("run_id", _Id, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("algorithm", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("error", Text),
    Column("config", Text, nullable=False),
    Column("directory", Text),
    Column("step", Integer, nullable=False),
    Column("steps", Integer),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("ended_at", Double),
)

metrics = Table(
    "metrics",
    metadata,
    Column("run_id", _Id, primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("name", _Id, primary_key=True),
    Column("value", Double),
    sqlite_with_rowid=False,
)
Index("metrics_name", metrics.c.run_id, metrics.c.name, metrics.c.step, metrics.c.value)


def create(connection: Connection, dialect: Dialect) -> None:
    """Create the tables of an empty database in one transaction. `connection` is in autocommit.

    Raises:
        StoreVersionError: another version of agl made the database, whose tables this one does not read.
        StoreError: the database is not an agl store.
    """
    if _is_store(connection, dialect):
        return
    try:
        for statement in dialect.begin_schema:
            connection.exec_driver_sql(statement).close()
        # Another process may have created them while this one waited for the lock.
        if not _is_store(connection, dialect):
            metadata.create_all(connection)
            connection.exec_driver_sql(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
            connection.exec_driver_sql(f"INSERT INTO {VERSION_TABLE} VALUES ('{VERSION}')")
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        connection.connection.rollback()
        raise


def _is_store(connection: Connection, dialect: Dialect) -> bool:
    """Whether the database has the tables of a store, False if it is empty. Raises as `create` does."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return False
    version = None
    if VERSION_TABLE in tables:
        version = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar()
    if version is None or not version.isdigit() or "rollouts" not in tables:
        raise StoreError("this database is not an agl store", hint=dialect.not_a_store_hint, store=dialect.url)
    if version > VERSION:
        raise StoreVersionError(
            f"the store has schema version {version}, this agl knows version {VERSION}",
            hint="upgrade agl, or name another store",
            store=dialect.url,
        )
    if version < VERSION:
        raise StoreVersionError(
            f"the store has schema version {version} of a development version, this agl knows version {VERSION}",
            hint="export what you need with the agl that made it (agl export --store STORE --out DIR), "
            "or name another store",
            store=dialect.url,
        )
    return True
