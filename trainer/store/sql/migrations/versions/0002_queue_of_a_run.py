"""The queue of one run, however many rollouts of others wait before it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    queued = sa.text("status = 'queuing'")
    op.create_index(
        "rollouts_run_queue",
        "rollouts",
        ["run_id", sa.text("priority DESC"), "seq"],
        sqlite_where=queued,
        postgresql_where=queued,
    )
