"""examples/games, shortened: from nothing but games against itself, a policy gets harder to beat."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("langgraph")

from agl.trainer.http.aio import run_in_thread
from agl.trainer.store import open_store
from examples.games.kuhn import __main__ as kuhn
from examples.games.kuhn.agent import action
from examples.games.kuhn.rules import PLAYERS, Situation
from examples.games.kuhn.scripts import situation
from examples.games.kuhn.strategy import read_strategy

pytestmark = pytest.mark.slow


@pytest.mark.night
def test_kuhn_gets_less_exploitable(tmp_path: Path) -> None:
    (points,) = kuhn.main(["--tiny", "--short", "--steps", "6", "--out", str(tmp_path)]).values()
    print(points)
    assert points[0][1] == pytest.approx(7 / 6, abs=0.1)
    assert points[-1][1] < 0.6
    run_in_thread(the_strategy_is_what_was_sampled(tmp_path))
    assert run_in_thread(goals(tmp_path)) == [(step, pytest.approx(value)) for step, value, _ in points[1:]]


async def goals(directory: Path) -> list[tuple[int, float]]:
    store = await open_store(f"sqlite:///{directory / 'one-shared-policy' / 'run.db'}")
    try:
        [run] = await store.query_runs()
        return [(m.step, m.value) for m in await store.query_metrics([run.run_id], names=["goal/exploitability"])]
    finally:
        await store.close()


async def the_strategy_is_what_was_sampled(directory: Path) -> None:
    """The answers of the first step, whose tokens and log-probs the engine recorded, have the probability that is read
    from the model: those that bet have together no more than it, and the likeliest of them alone nearly as much."""
    models = dict.fromkeys(PLAYERS, (directory / "start" / "done").read_text())
    strategy = read_strategy(models)
    store = await open_store(f"sqlite:///{directory / 'one-shared-policy' / 'run.db'}")
    bets: dict[Situation, dict[str, float]] = defaultdict(dict)
    try:
        for rollout in await store.query_rollouts(mode="train", step=0):
            for call in await store.query_calls(rollout.rollout_id):
                text = str((call.response or {})["content"])
                if action(text) == "bet":
                    bets[situation({"messages": call.request["messages"]})][text] = math.exp(float(call.logprobs.sum()))
    finally:
        await store.close()
    assert len(bets) >= 6
    for known, answers in bets.items():
        assert sum(answers.values()) <= strategy[known] + 1e-3
        assert max(answers.values()) >= strategy[known] - 0.05
