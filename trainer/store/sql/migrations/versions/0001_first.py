"""The first schema. No store is made by it any more: a new one gets the newest tables, and a store has it already."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    raise AssertionError("a store is never older than its first version")
