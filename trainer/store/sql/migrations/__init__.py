"""Creates the tables of a new database, and upgrades those of an old one, for which alone Alembic is imported."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect

from agl.errors import StoreError, StoreVersionError
from agl.trainer.store.sql import schema
from agl.trainer.store.sql.dialect import Dialect
from agl.trainer.store.sql.schema import VERSION_TABLE


def upgrade(connection: Connection, dialect: Dialect) -> None:
    """Create or upgrade the tables in one transaction. `connection` is in autocommit.

    Raises:
        StoreVersionError: a newer version of agl wrote the database.
        StoreError: the database is not an agl store.
    """
    if version(connection, dialect) == schema.VERSION:
        return
    try:
        for statement in dialect.begin_schema:
            connection.exec_driver_sql(statement).close()
        # Another process may have upgraded them while this one waited for the lock.
        present = version(connection, dialect)
        if present is None:
            schema.metadata.create_all(connection)
            connection.exec_driver_sql(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
            connection.exec_driver_sql(f"INSERT INTO {VERSION_TABLE} VALUES ('{schema.VERSION}')")
        elif present != schema.VERSION:
            _run_alembic(connection)
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        connection.connection.rollback()
        raise


def version(connection: Connection, dialect: Dialect) -> str | None:
    """The database's schema version, None for an empty database. Raises as `upgrade` does."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    revision = None
    if VERSION_TABLE in tables:
        revision = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar()
    if revision is None or not revision.isdigit() or "rollouts" not in tables:
        raise StoreError("this database is not an agl store", hint=dialect.not_a_store_hint, store=dialect.url)
    if revision > schema.VERSION:
        raise StoreVersionError(
            f"the store has schema version {revision}, this agl knows versions up to {schema.VERSION}",
            hint="upgrade agl, or name another store",
            store=dialect.url,
        )
    return revision


def _run_alembic(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, schema.VERSION)
