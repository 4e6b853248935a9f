"""The rollouts of the next step begin while an update is under way, and are sampled from the weights that it makes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from running import say
from tiny_run import TRAIN, VAL

import agl
from agl.trainer.store import open_store

STEPS, GROUP = 4, 16
ROLLOUTS = 2 * GROUP


def run(policy: Path, directory: Path, val: list[Any]) -> tuple[list[str], agl.Result]:
    """Train; "step N" for each entry, and "agent" for each training rollout that begins, in order."""
    told: list[str] = []

    @agl.rollout
    def agent(task: dict[str, str], llm: agl.LLM) -> float:
        if task in TRAIN:
            told.append("agent")
        return len(say(llm, task["question"])) % 5 / 4

    class Watch(agl.Callback):
        def on_step(self, run: Any, entry: Any) -> None:
            told.append(f"step {entry['step']}")

    algorithm = agl.GRPO(
        model=str(policy), group_size=GROUP, batch_size=2, steps=STEPS, learning_rate=1e-3, max_response_tokens=24,
        max_context=128, val_every=1, val_before_train=False,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=4, directory=directory, progress=False, callbacks=[Watch()])
    return told, trainer.fit(agent, TRAIN, val)


def test_agents_start_during_an_update_and_are_answered_after_it(untrained_model: Path, tmp_path: Path) -> None:
    told, result = run(untrained_model, tmp_path, [])
    assert told.count("agent") == STEPS * ROLLOUTS
    # How long an update takes is known from the first one on.
    assert told.index("step 1") == ROLLOUTS
    assert told.index("step 2") > 2 * ROLLOUTS + 1, told
    assert told.index("step 3") > 3 * ROLLOUTS + 2, told

    async def versions() -> list[set[int]]:
        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        try:
            found = []
            for step in range(STEPS):
                rollouts = await store.query_rollouts(run_id=result.run_id, step=step, mode="train")
                calls = [call for r in rollouts for call in await store.query_calls(r.rollout_id)]
                found.append({call.policy_version for call in calls})
            return found
        finally:
            await store.close()

    assert asyncio.run(versions()) == [{0}, {1}, {2}, {3}]


def test_a_validation_has_the_machine_to_itself(untrained_model: Path, tmp_path: Path) -> None:
    told, _ = run(untrained_model, tmp_path, VAL)
    assert told == [event for step in range(1, STEPS + 1) for event in (*["agent"] * ROLLOUTS, f"step {step}")]
