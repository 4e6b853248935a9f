"""When things die: the short form of `benchmarks/chaos.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chaos import Chaos, Plan

pytestmark = pytest.mark.slow


def test_a_run_ends_whole_whatever_is_killed(untrained_model: Path, tmp_path: Path) -> None:
    chaos = Chaos(Plan(seed=1), untrained_model, tmp_path, say=print)
    chaos.run()
    facts = asyncio.run(chaos.check())
    assert facts["trainer_starts"] == 2
