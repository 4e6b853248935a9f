"""The tables of a store's first version, as its migration made them; what is written here never changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext

_Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Id = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def create(connection: sa.Connection) -> None:
    """Make an empty store of version 0001."""
    op = Operations(MigrationContext.configure(connection))
    op.create_table("alembic_version", sa.Column("version_num", sa.String(32), primary_key=True))
    op.execute("INSERT INTO alembic_version VALUES ('0001')")
    op.create_table(
        "rollouts",
        sa.Column("seq", _Serial, primary_key=True),
        sa.Column("rollout_id", _Id, nullable=False, unique=True),
        sa.Column("run_id", _Id),
        sa.Column("step", sa.Integer()),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("group_key", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("resources_id", _Id),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
    )
    op.create_index("rollouts_queue", "rollouts", ["status", sa.text("priority DESC"), "seq"])
    op.create_index("rollouts_run", "rollouts", ["run_id", "step"])
    op.create_table(
        "attempts",
        sa.Column("rollout_id", _Id, primary_key=True),
        sa.Column("attempt", sa.Integer(), primary_key=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("worker_id", _Id),
        sa.Column("error", sa.Text()),
        sa.Column("timeout_seconds", sa.Double()),
        sa.Column("unresponsive_seconds", sa.Double()),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("last_heartbeat_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
    )
    op.create_index("attempts_status", "attempts", ["status"])
    op.create_table(
        "calls",
        sa.Column("seq", _Serial, primary_key=True),
        sa.Column("id", _Id, nullable=False, unique=True),
        sa.Column("rollout_id", _Id, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text()),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("shared", sa.Integer(), nullable=False),
        sa.Column("prompt", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("parent_id", _Id),
        sa.Column("fork_cause", sa.Text()),
        sa.Column("tool_call_ids", sa.Text(), nullable=False),
        sa.Column("span_id", _Id),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
    )
    op.create_index("calls_rollout", "calls", ["rollout_id", "attempt"])
    op.create_table(
        "spans",
        sa.Column("trace_id", _Id, primary_key=True),
        sa.Column("span_id", _Id, primary_key=True),
        sa.Column("parent_id", _Id),
        sa.Column("rollout_id", _Id, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("status_message", sa.Text()),
        sa.Column("attributes", sa.Text(), nullable=False),
        sa.Column("events", sa.Text(), nullable=False),
    )
    op.create_index("spans_rollout", "spans", ["rollout_id", "attempt"])
    op.create_table(
        "resources",
        sa.Column("seq", _Serial, primary_key=True),
        sa.Column("resources_id", _Id, nullable=False, unique=True),
        sa.Column("resources", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "policy_versions",
        sa.Column("run_id", _Id, primary_key=True),
        sa.Column("policy", sa.Text(), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("checkpoint", sa.Text()),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "trained_calls",
        sa.Column("run_id", _Id, primary_key=True),
        sa.Column("call_id", _Id, primary_key=True),
        sa.Column("step", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("rollout_id", _Id, nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.Integer()),
        sa.Column("reward", sa.Double(), nullable=False),
        sa.Column("return_value", sa.Double(), nullable=False),
        sa.Column("advantage", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("dropped", sa.Text()),
    )
    op.create_index("trained_calls_rollout", "trained_calls", ["rollout_id"])
