"""Alembic's entry: runs the migrations on the caller's connection, within the caller's transaction."""

from alembic import context

from agl.trainer.store.sql import schema

# Every statement belongs to the transaction that the caller opened, so alembic must begin and commit nothing.
context.configure(connection=context.config.attributes["connection"], target_metadata=schema.metadata)
context.run_migrations()
