"""Memories: what rollouts leave for later ones."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_Id = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "memories",
        sa.Column("seq", _Serial, primary_key=True),
        sa.Column("scope", _Id, nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("since", sa.Integer(), nullable=False),
        sa.Column("until", sa.Integer()),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("reward", sa.Double()),
        sa.Column("source", sa.Text()),
        sa.Column("embedding", sa.LargeBinary()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
    )
    op.create_index("memories_scope", "memories", ["scope", "since"])
