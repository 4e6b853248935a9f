"""`examples/rl_loop.py`: the whole loop on two screens, and it learns."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"


@pytest.fixture
def rl_loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rl_loop", module)
    spec.loader.exec_module(module)
    return module


def test_it_learns(rl_loop: ModuleType, tiny_policy: Path, no_process_left: None) -> None:
    rewards = asyncio.run(rl_loop.main(rl_loop.Config(model=str(tiny_policy), steps=4)))
    assert len(rewards) == 4
    assert rewards[-1] - rewards[0] > 0.25


def test_it_stays_short_and_needs_no_trainer() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 150
    assert "agl.Trainer(" not in text
