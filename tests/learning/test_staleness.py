"""Sampling that runs ahead of learning: calls are as old as the bound allows, it learns, and nothing counts twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from miniature import GAIN, gain, train

import agl
from agl.trainer.engines.base import Completion, OnTokens, Request
from agl.trainer.local.policy import LocalPolicy
from agl.trainer.store import open_store

pytestmark = pytest.mark.slow


async def _trained(directory: Path, run_id: str) -> list[tuple[int, Any, Any]]:
    """(step of the rollout, call, how it was trained) of every call that a step of the run has counted."""
    store = await open_store(f"sqlite:///{directory / 'run.db'}")
    try:
        found = []
        for rollout in await store.query_rollouts(run_id=run_id, mode="train"):
            calls = {call.id: call for call in await store.query_calls(rollout.rollout_id)}
            trained = await store.query_trained_calls(rollout.rollout_id)
            found += [(rollout.step, calls[t.call_id], t) for t in trained if t.call_id in calls]
        return found
    finally:
        await store.close()


@pytest.mark.night
def test_it_learns_from_calls_that_are_one_update_old(tiny_policy: Path, tmp_path: Path) -> None:
    result = train(tiny_policy, tmp_path, max_staleness=1)
    assert gain(result) >= GAIN
    lags: dict[int, set[int]] = {}
    for step, call, trained in asyncio.run(_trained(tmp_path, result.run_id)):
        lags.setdefault(step, set()).add(trained.policy_version - 1 - call.policy_version)
    assert lags == {0: {0}} | {step: {1} for step in range(1, 6)}
    assert [entry["train/staleness"] for entry in result.history[1:]] == [0, 1, 1, 1, 1, 1]


BOUND, STEPS = 4, 6
MOST_ASKED = 60
LONG = "<long>"
"""A stop text that marks the requests of the slow tool."""


class _Steps(agl.Callback):
    """How many steps have ended."""

    ended = 0

    def on_step(self, run: Any, entry: Any) -> None:
        self.ended += 1


def _fit(policy: Path, directory: Path, *callbacks: agl.Callback, resume: bool = False) -> agl.Result:
    """Train the quickstart's agent, whose tool now and then takes long: it goes on asking the policy until a step has
    ended, however fast the machine samples."""
    from langchain.agents import create_agent
    from langchain.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    from agl.trainer.quickstart.demos import SYSTEM_PROMPT
    from agl.trainer.quickstart.tasks import arithmetic_tasks, calculate, exact_answer

    waits, steps = random.Random(1), _Steps()

    @tool
    async def calculator(expression: str) -> str:
        """Calculate `a op b`, where a and b are integers and op is one of + - * /."""
        if waits.random() < 0.03:
            begun = steps.ended
            # Bounded, since no step ends during a validation.
            for _ in range(MOST_ASKED):
                if steps.ended > begun:
                    break
                await model.ainvoke([("system", SYSTEM_PROMPT), ("user", f"What is {expression}?")], stop=[LONG])
        return calculate(expression)

    model = ChatOpenAI(model="policy", api_key=SecretStr("unused"), max_completion_tokens=48)
    agent = create_agent(model, [calculator], system_prompt=SYSTEM_PROMPT, name="solver")
    algorithm = agl.GRPO(
        model=str(policy), group_size=8, batch_size=8, steps=STEPS, learning_rate=5e-4, betas=(0.9, 0.95),
        max_response_tokens=48, max_context=256, max_batch=64, val_every=STEPS, max_staleness=BOUND,
        checkpoint_every=1,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=96, directory=directory, progress=False, callbacks=(*callbacks, steps))
    tasks = arithmetic_tasks(256, seed=0, split="train"), arithmetic_tasks(96, seed=0, split="heldout")
    return trainer.fit(agl.wrap(agent, reward=exact_answer), *tasks, resume=resume)


def _check(directory: Path, result: agl.Result) -> list[tuple[int, Any, Any]]:
    """Every rollout has counted in one step, and no token was older than the bound; what was trained."""
    counted = asyncio.run(_trained(directory, result.run_id))
    standing = [(step, call, t) for step, call, t in counted if t.dropped is None or "was stopped" not in t.dropped]
    steps_of: dict[str, set[int]] = {}
    for _, call, trained in standing:
        steps_of.setdefault(call.rollout_id, set()).add(trained.step)
        assert 0 <= trained.step - 1 - call.policy_version <= BOUND
        assert call.policy_version <= call.newest_version <= trained.step - 1
    assert all(len(steps) == 1 for steps in steps_of.values())
    of_steps = Counter(step for steps in steps_of.values() for step in steps)
    assert of_steps == {step: 64 for step in range(1, STEPS + 1)}
    return standing


class _UnderWay:
    """Has the slow tool's answers use all their tokens, and new weights come in the middle of one, where any is due."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requested, self.under_way = 0, 0
        generate, train = LocalPolicy.generate, LocalPolicy.train

        async def answered(policy: LocalPolicy, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
            if LONG not in request.sampling.stop:
                return await generate(policy, request, on_tokens=on_tokens)
            begun = False

            def came(*tokens: Any) -> None:
                nonlocal begun
                if not begun:
                    begun, self.under_way = True, self.under_way + 1
                if on_tokens is not None:
                    on_tokens(*tokens)

            endless = replace(request, sampling=replace(request.sampling, stop=(), stop_token_ids=()))
            self.requested += 1
            try:
                return await generate(policy, endless, on_tokens=came)
            finally:
                self.requested -= 1
                self.under_way -= begun

        async def trained(policy: LocalPolicy, *rows: Any, **options: Any) -> dict[str, float]:
            # Of what is requested, something is sampled soon.
            while self.requested and not self.under_way:
                await asyncio.sleep(0.001)
            return await train(policy, *rows, **options)

        monkeypatch.setattr(LocalPolicy, "generate", answered)
        monkeypatch.setattr(LocalPolicy, "train", trained)


def test_it_learns_while_weights_change_in_flight(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _UnderWay(monkeypatch)
    result = _fit(tiny_policy, tmp_path)
    assert gain(result) >= GAIN
    standing = _check(tmp_path, result)
    assert any(len(call.versions) > 1 for _, call, _ in standing), "no answer went on under new weights"
    assert any(trained.step - 1 > step for step, _, trained in standing), "no slow rollout counted in a later step"
    staleness = [entry["train/staleness"] for entry in result.history[1:]]
    # Counted in another way: by rollouts' calls of one version alone.
    for entry in result.history[1:]:
        calls = [call for _, call, t in standing if t.step == entry["step"]]
        tokens = sum(call.response_ids.size for call in calls)
        late = sum((entry["step"] - 1 - v) * n for call in calls for v, n in _tokens_by_version(call).items())
        assert entry["train/staleness"] == pytest.approx(late / tokens)
    assert max(staleness) > 0.5


def _tokens_by_version(call: Any) -> Counter[int]:
    """Version -> how many of the call's tokens it has sampled, token by token."""
    count, versions = Counter[int](), dict(call.versions)
    version = call.policy_version
    for i in range(call.response_ids.size):
        version = versions.get(i, version)
        count[version] += 1
    return count


class _Stop(agl.Callback):
    """Interrupts the program after a step, as Ctrl-C does."""

    def __init__(self, how: Callable[[], None]) -> None:
        self.how = how

    def on_checkpoint(self, run: Any, path: Path, step: int) -> None:
        if step == 2:
            self.how()


def test_a_resumed_run_trains_what_was_under_way_once(tiny_policy: Path, tmp_path: Path, no_process_left: None) -> None:
    def interrupt() -> None:
        # In the middle of the next step.
        threading.Thread(target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()

    with pytest.raises(KeyboardInterrupt):
        _fit(tiny_policy, tmp_path, _Stop(interrupt))
    result = _fit(tiny_policy, tmp_path, resume=True)
    assert [entry["step"] for entry in result.history] == list(range(STEPS + 1))
    _check(tmp_path, result)
