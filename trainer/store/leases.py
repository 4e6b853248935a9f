"""Leases as a store has them."""

from __future__ import annotations

from agl.errors import NotStoredError
from agl.trainer.store.base import Store
from agl.trainer.store.types import ATTEMPT_TERMINAL


async def is_open_lease(store: Store, rollout_id: str, attempt: int, secret: str) -> bool:
    """Whether a secret is that of an attempt's lease, and the attempt has not ended."""
    if not await store.is_leased_with(rollout_id, attempt, [secret]):
        return False
    try:
        attempts = await store.query_attempts(rollout_id)
    except NotStoredError:
        return False
    return any(a.attempt == attempt and a.status not in ATTEMPT_TERMINAL for a in attempts)
