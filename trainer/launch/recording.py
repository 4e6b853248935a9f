"""What applications ask of a served policy, in a store: a rollout for each conversation, which `agl.traces` reads.

A conversation has no end that anybody could see. Its rollout has succeeded from its first answer on, and later calls
are added to it, so that nothing is lost when the server is killed.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from agl.errors import AglError, UnreadableMessageError
from agl.mdp.types import Call
from agl.messages import foreign, read
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout, RolloutConfig

log = logging.getLogger("agl.serve")

BEGUN = 4096
"""Conversations that are remembered to have a rollout; of another one the store is asked again."""


class Recording:
    """The store as a gateway writes to it.

    Args:
        store: where to.
        models: policy -> its directory.

    Attributes:
        run_id: of all rollouts of this server.
        rollouts: how many there are.
    """

    def __init__(self, store: Store, models: dict[str, str]) -> None:
        self.run_id = f"serve-{uuid.uuid4().hex[:8]}"
        self.rollouts = 0
        self._store = store
        self._models = models
        self._begun: dict[str, None] = {}
        self._one_at_a_time = asyncio.Lock()
        self._failed = False

    async def add_calls(self, calls: Sequence[Call]) -> None:
        """Record the calls that sampled something. What cannot be stored is logged; the application has its answer."""
        sampled = [call for call in calls if call.response_ids.size]
        if not sampled:
            return
        try:
            for call in sampled:
                await self._begin(call)
            await self._store.add_calls(sampled)
        except AglError as error:
            # The first is enough: a full disk would fill the log, too.
            if not self._failed:
                log.error("calls are not recorded: %s", error)
            self._failed = True
        else:
            self._failed = False

    async def _begin(self, call: Call) -> None:
        """Have a rollout for the call's conversation."""
        async with self._one_at_a_time:
            if call.rollout_id in self._begun:
                return
            new = NewRollout(
                task=_question(call),
                mode="collect",
                run_id=self.run_id,
                index=self.rollouts,
                config=RolloutConfig(max_attempts=1),
                metadata={"agent": call.agent, "model": self._models.get(str(call.policy), str(call.policy))},
                rollout_id=call.rollout_id,
            )
            await self._store.enqueue_rollouts([new])
            if await self._store.dequeue_rollout("agl serve", run_id=self.run_id) is not None:
                await self._store.update_attempt(call.rollout_id, call.attempt, "succeeded")
                self.rollouts += 1
            self._begun[call.rollout_id] = None
            if len(self._begun) > BEGUN:
                del self._begun[next(iter(self._begun))]


def _question(call: Call) -> dict[str, Any] | str | None:
    """The question of a conversation's first call: its text, or what else belongs to it; None if none is recorded."""
    try:
        asked = foreign.last_question(read.messages(call.request.get("messages") or []))
    except UnreadableMessageError:
        return None
    return asked["input"] if asked is not None and asked.keys() == {"input"} else asked
