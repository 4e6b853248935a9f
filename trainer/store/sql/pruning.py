"""Deleting what rollouts that ended long ago left behind, a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, Table, delete, exists, or_, select

from agl.trainer.store.base import ROLLOUT_TERMINAL, Pruned
from agl.trainer.store.sql.schema import attempts as A
from agl.trainer.store.sql.schema import calls as C
from agl.trainer.store.sql.schema import rollouts as R
from agl.trainer.store.sql.schema import spans as S

LOOKED_AT: Final = 5000
"""How many rollouts are looked at in one transaction."""
EMPTIED: Final = 100
"""How many of them are emptied in it: others wait for it to be committed."""


def prune(
    connection: Connection, before: float, run_ids: Sequence[str] | None, cursor: int
) -> tuple[Pruned, int | None]:
    """Empty rollouts that ended before that time, from `cursor` on: what was deleted, and where to go on or None."""
    window = connection.execute(select(R.c.seq).where(R.c.seq > cursor).order_by(R.c.seq).limit(LOOKED_AT)).scalars()
    seqs = window.all()
    if not seqs:
        return Pruned(), None
    full = or_(*(exists().where(table.c.rollout_id == R.c.rollout_id) for table in (A, C, S)))
    old = (
        select(R.c.seq, R.c.rollout_id)
        .where(R.c.seq > cursor, R.c.seq <= seqs[-1], R.c.ended_at < before, full)
        .where(R.c.status.in_(sorted(ROLLOUT_TERMINAL)))
        .order_by(R.c.seq)
        .limit(EMPTIED)
    )
    if run_ids is not None:
        old = old.where(R.c.run_id.in_(list(run_ids)))
    found = connection.execute(old).all()
    ids = [rollout_id for _, rollout_id in found]
    gone = [_delete(connection, table, ids) if ids else 0 for table in (A, C, S)]
    return Pruned(len(ids), *gone), found[-1][0] if len(found) == EMPTIED else seqs[-1]


def _delete(connection: Connection, table: Table, rollout_ids: Sequence[str]) -> int:
    return connection.execute(delete(table).where(table.c.rollout_id.in_(rollout_ids))).rowcount
