"""`examples/rag`, shortened: reinforcement teaches the policy to search, which is why it knows."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("agents")
pytest.importorskip("mcp")

from examples.rag.__main__ import main


@pytest.mark.night
@pytest.mark.slow
def test_it_learns_to_search(tmp_path: Path) -> None:
    result = main(["--tiny", "--short", "--out", str(tmp_path / "run")])
    assert result is not None
    success = {name: policy["success"] for name, policy in result["policies"].items()}
    assert success["after"]["low"] > success["before"]["high"], result
    assert success["after, no tool"]["value"] == 0, result
