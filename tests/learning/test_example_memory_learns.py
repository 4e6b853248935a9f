"""examples/memory, shortened: reinforcement teaches the policy to look in its memory, which is why it knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.memory import __main__ as program


@pytest.mark.slow
def test_it_learns_to_recall(tmp_path: Path) -> None:
    result = program.main(["--tiny", "--short", "--out", str(tmp_path)])
    assert result is not None
    success = {name: policy["success"] for name, policy in result["policies"].items()}
    assert success["after"]["low"] > 0.35, "who never looks is right in one of eight"
    assert success["after"]["low"] > success["after, memory shuffled"]["high"]
    assert success["after"]["low"] > success["after, memory off"]["high"]
