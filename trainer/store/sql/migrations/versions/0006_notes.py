"""Notes: what programs keep next to their rollouts."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_Id = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table("notes", sa.Column("key", _Id, primary_key=True), sa.Column("value", sa.Text(), nullable=False))
