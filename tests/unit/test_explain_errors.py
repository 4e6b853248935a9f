"""What `agl explain` prints of a rollout."""

from __future__ import annotations

import asyncio

import pytest

from agl.errors import RolloutError
from agl.trainer.report.explain import describe, renderable
from agl.trainer.report.terminal import console
from agl.trainer.store import open_store
from agl.trainer.store.types import NewRollout, RolloutConfig


def test_a_failed_attempt_shows_its_error_and_not_the_hint(capsys: pytest.CaptureFixture[str]) -> None:
    error = RolloutError(
        "agent 'a' raised RuntimeError: the tool server said 500", hint="it will be retried", attempt=1
    )

    async def main() -> None:
        store = await open_store("sqlite://")
        try:
            config = RolloutConfig(max_attempts=1)
            (rollout,) = await store.enqueue_rollouts([NewRollout({"question": "?"}, config=config)])
            await store.dequeue_rollout("w")
            await store.update_attempt(rollout.rollout_id, 1, "running")
            await store.update_attempt(rollout.rollout_id, 1, "failed", error=f"Traceback:\n  ...\n{error}")
            console(width=200).print(renderable(await describe(store, rollout.rollout_id)))
        finally:
            await store.close()

    asyncio.run(main())
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("attempt 1"))
    assert line.startswith("attempt 1 failed: agent 'a' raised RuntimeError: the tool server said 500")
