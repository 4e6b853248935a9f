"""Attempts know the request that leased them, so that a repeated one gets the same lease."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("request_id", sa.Text()))
    op.create_index("attempts_request", "attempts", ["request_id"])
