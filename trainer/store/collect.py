"""Rollouts of programs that are traced without code: one per process, in the default store."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agl.mdp.spans import Span
from agl.tracing.context import RolloutContext
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.location import store_url
from agl.trainer.store.types import Mode, NewRollout, RolloutConfig

_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)S?$")
_SHORTEST_SECRET = 8
_KEY_NAME = re.compile(r"(^|[-_])(api[-_]?key|key|token|secret|password)$", re.I)
_KEY_OPTION = re.compile(r"^--?([\w-]*[-_])?(api[-_]?key|key|token|secret|password)$", re.I)
"""Names of values that are keys, and options that stand before such a value."""
_KEY = re.compile(r"\b(?:sk|pk|rk|hf|ghp|gho|xox[a-z]|AIza)[-_]?[\w-]{16,}")
"""How keys of well-known services begin."""


def shown_command(arguments: Sequence[str], *, content: bool = True) -> str:
    """A command line as it is recorded: without the keys in it, and with the names of environment variables that hold
    keys in place of their values. Without `content`, the program alone: its arguments may be texts."""
    if not content:
        return shlex.join(arguments[:1]) + (" ..." if arguments[1:] else "")
    known = {v: n for n, v in os.environ.items() if _SECRET.search(n) and len(v) >= _SHORTEST_SECRET}
    words: list[str] = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        name, assigned, _ = word.partition("=")
        if not any(value in word for value in known):
            if _KEY_OPTION.search(before):
                word = "[key]"
            elif assigned and _KEY_NAME.search(name):
                word = f"{name}=[key]"
            word = _KEY.sub("[key]", word)
        words.append(word)
    text = shlex.join(words)
    for value, name in known.items():
        text = text.replace(value, f"${name}")
    return text


def new_rollout(task: Any, mode: Mode, rollout_id: str, *, seed: int = 0, **metadata: Any) -> NewRollout:
    """A rollout with one attempt, in a separate run, so that no other worker leases it."""
    return NewRollout(
        task=task,
        mode=mode,
        seed=seed,
        run_id=f"run-{uuid.uuid4().hex[:8]}",
        config=RolloutConfig(max_attempts=1),
        metadata=metadata,
        rollout_id=rollout_id,
    )


def moment(began: float) -> float:
    """A time of the monotonic clock in seconds since the epoch, by what the wall clock says now."""
    return time.time() - (time.monotonic() - began)


class StoreSink:
    """The rollout of this process in the store: it is created with the first span and ends with the process.

    Args:
        rollout: context of the rollout.
        arguments: command line of the process.
        began: when the process began, by the monotonic clock.

    Raises:
        AglError: the store cannot be opened.
    """

    def __init__(self, rollout: RolloutContext, arguments: Sequence[str], began: float) -> None:
        self._rollout = rollout
        self._began = began
        self._runner = asyncio.Runner()
        try:
            self._store: Store = self._runner.run(self._open(arguments))
        except BaseException:
            self._runner.close()
            raise

    def send(self, spans: Sequence[Span]) -> None:
        """Store spans. Returns once they are stored."""
        self._runner.run(self._store.add_spans(spans))

    def finish(self, error: str | None) -> None:
        """End the attempt."""
        with self._runner:
            self._runner.run(self._finish(error))

    async def _open(self, arguments: Sequence[str]) -> Store:
        store = await open_store(store_url())
        command = shown_command(arguments, content=self._rollout.capture_content)
        new = new_rollout({"command": command}, "collect", self._rollout.rollout_id, agent=self._rollout.agent)
        await store.enqueue_rollouts([replace(new, created_at=moment(self._began))])
        # None in a forked child: its parent has leased the rollout already.
        if await store.dequeue_rollout(f"process-{os.getpid()}", run_id=new.run_id) is not None:
            await store.update_attempt(self._rollout.rollout_id, self._rollout.attempt, "running")
        return store

    async def _finish(self, error: str | None) -> None:
        status = "succeeded" if error is None else "failed"
        await self._store.update_attempt(self._rollout.rollout_id, self._rollout.attempt, status, error=error)
        await self._store.close()
