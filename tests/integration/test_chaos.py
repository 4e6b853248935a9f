"""When things die: the short form of `benchmarks/chaos.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chaos import Chaos, Plan, power_cut

pytestmark = pytest.mark.slow


@pytest.mark.night
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_run_ends_whole_whatever_is_killed(
    database: str, untrained_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url, breaks = None, None
    if database == "postgresql":
        server = request.getfixturevalue("postgres")
        url, breaks = server.new_database(), power_cut(server)
    chaos = Chaos(Plan(seed=1), untrained_model, tmp_path, database=url, break_connections=breaks, say=print)
    chaos.run()
    facts = asyncio.run(chaos.check())
    assert facts["trainer_starts"] == 2
    assert facts["killed"] == {"runner": 2, "store": 1, "trainer": 1, "database": 1}


@pytest.mark.night
def test_a_run_whose_policy_is_killed_ends_at_once_and_goes_on(untrained_model: Path, tmp_path: Path) -> None:
    """Instead of giving its rollouts attempt after attempt that nothing answers."""
    plan = Plan(where="local", steps=4, workers=1, kills={"policy": 1}, seed=1)
    chaos = Chaos(plan, untrained_model, tmp_path, say=print)
    chaos.run()
    assert "the policy process died (exit code -9)" in chaos.trainer.said()
    facts = asyncio.run(chaos.check())
    assert facts["trainer_starts"] == 2
    assert "failed" not in facts["statuses"]
    assert facts["second_attempts"] == 0
