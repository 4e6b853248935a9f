"""examples/memory, shortened: reinforcement teaches the policy to look in its memory, which is why it knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.memory import __main__ as program


@pytest.mark.night
@pytest.mark.slow
def test_it_learns_to_recall(tmp_path: Path) -> None:
    result = program.main(["--tiny", "--short", "--out", str(tmp_path)])
    assert result is not None
    success = {name: policy["success"] for name, policy in result["policies"].items()}
    on, off, shuffled = (success[name] for name in ("after", "after, memory off", "after, memory shuffled"))
    assert on["low"] > 0.55, "before training it is right in 35 to 50 of 100"
    assert on["low"] > shuffled["high"], result
    assert shuffled["low"] > off["high"], result
