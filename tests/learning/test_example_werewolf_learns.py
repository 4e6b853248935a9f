"""examples/games/werewolf, shortened: who plays against the policy that it began as does better for its side."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("langgraph")

from examples.games.werewolf import __main__ as program


@pytest.mark.slow
def test_the_werewolf_learns_to_keep_its_secret(tmp_path: Path) -> None:
    result = program.main(["--tiny", "--short", "--out", str(tmp_path)])
    success = {name: policy["success"] for name, policy in result["policies"].items()}
    assert success["trained werewolf"]["high"] < success["start"]["low"], success
