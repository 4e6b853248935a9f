"""Deletes attempts, calls and spans of rollouts that ended long ago, in bounded transactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, delete, exists, or_, select

from agl.trainer.store.sql.schema import attempts as A
from agl.trainer.store.sql.schema import calls as C
from agl.trainer.store.sql.schema import rollouts as R
from agl.trainer.store.sql.schema import spans as S
from agl.trainer.store.types import ROLLOUT_TERMINAL, Pruned

EXAMINED: Final = 5000
"""Maximum number of rollouts that one transaction examines."""
PRUNED: Final = 100
"""Maximum number of rollouts that one transaction prunes: other writers wait for its commit."""


def prune(
    connection: Connection, before: float, run_ids: Sequence[str] | None, cursor: int
) -> tuple[Pruned, int | None]:
    """Prune rollouts that ended before that time, from `cursor` on.

    Returns:
        What was deleted, and the next cursor; None after the last rollout.
    """
    window = connection.execute(select(R.c.seq).where(R.c.seq > cursor).order_by(R.c.seq).limit(EXAMINED)).scalars()
    seqs = window.all()
    if not seqs:
        return Pruned(), None
    has_records = or_(*(exists().where(table.c.rollout_id == R.c.rollout_id) for table in (A, C, S)))
    old = (
        select(R.c.seq, R.c.rollout_id)
        .where(R.c.seq > cursor, R.c.seq <= seqs[-1], R.c.ended_at < before, has_records)
        .where(R.c.status.in_(sorted(ROLLOUT_TERMINAL)))
        .order_by(R.c.seq)
        .limit(PRUNED)
    )
    if run_ids is not None:
        old = old.where(R.c.run_id.in_(list(run_ids)))
    rows = connection.execute(old).all()
    ids = [rollout_id for _, rollout_id in rows]
    deleted = [
        connection.execute(delete(table).where(table.c.rollout_id.in_(ids))).rowcount if ids else 0
        for table in (A, C, S)
    ]
    return Pruned(len(ids), *deleted), rows[-1][0] if len(rows) == PRUNED else seqs[-1]
