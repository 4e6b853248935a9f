"""Attempts know the hash of the secret that proves who leased them."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("secret_hash", sa.LargeBinary()))
