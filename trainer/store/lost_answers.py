"""Marks the calls of an attempt whose answers nobody received, when it ends: so every reader of the store sees them."""

from __future__ import annotations

from collections.abc import Sequence

from agl.mdp.lost_answers import lost_answers
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.trainer.store.base import Records


async def mark_lost_answers(store: Records, calls: Sequence[Call], spans: Sequence[Span]) -> list[Call]:
    """An attempt's calls as they are in the store then: those with a lost answer are cancelled.

    Raises:
        StoreError: they cannot be stored.
    """
    lost = {call.id: call for call in lost_answers(calls, spans)}
    if lost:
        await store.add_calls([*lost.values()])
    return [lost.get(call.id, call) for call in calls]
