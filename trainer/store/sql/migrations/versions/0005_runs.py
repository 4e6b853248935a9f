"""Runs and their metrics. A run that is known by its rollouts alone is recorded as stopped: how it ended is unknown."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_Id = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", _Id, primary_key=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("algorithm", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("directory", sa.Text()),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
    )
    op.create_index("runs_created", "runs", ["created_at", "run_id"])
    op.create_table(
        "metrics",
        sa.Column("run_id", _Id, primary_key=True),
        sa.Column("step", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("name", _Id, primary_key=True),
        sa.Column("value", sa.Double()),
        sqlite_with_rowid=False,
    )
    op.create_index("metrics_name", "metrics", ["run_id", "name", "step", "value"])
    # A program that was traced, and a rollout that its caller ran itself, have runs to themselves, which train nothing.
    op.execute(
        """
        INSERT INTO runs
            (run_id, name, algorithm, status, config, step, created_at, updated_at, ended_at)
        SELECT run_id, '', '', 'stopped', '{}', coalesce(max(step), 0), min(created_at),
            max(coalesce(ended_at, created_at)), max(ended_at)
        FROM rollouts
        WHERE run_id IS NOT NULL AND run_id NOT LIKE '%/started/%' AND (step IS NOT NULL OR mode IN ('train', 'val'))
        GROUP BY run_id
        """
    )
