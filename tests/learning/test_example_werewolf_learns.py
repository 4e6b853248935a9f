"""examples/games/werewolf, shortened: who plays against the policy that it began as does better for its side.

It takes nearly four minutes of processor time, most of them for a start that plays at all, so it waits for the night.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("langgraph")

from examples.games.werewolf import __main__ as program

pytestmark = pytest.mark.night


def test_the_werewolf_learns_to_keep_its_secret(tmp_path: Path) -> None:
    result = program.main(["--tiny", "--short", "--out", str(tmp_path)])
    success = {name: policy["success"] for name, policy in result["policies"].items()}
    assert success["trained werewolf"]["high"] < success["start"]["low"], success
