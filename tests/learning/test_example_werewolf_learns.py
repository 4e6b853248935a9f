"""examples/games/werewolf: the werewolf does better for its side than the policy that it began as.

Shortened, among players of a script; at night the whole, in which each role is a policy and learns.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("langgraph")

from examples.games.werewolf import __main__ as program


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.parametrize("form", ["--short", None])
def test_the_werewolf_learns_to_keep_its_secret(form: str | None, tmp_path: Path) -> None:
    result = program.main(["--tiny", *filter(None, [form]), "--out", str(tmp_path)])
    success = {name: policy["success"] for name, policy in result["policies"].items()}
    assert success["trained werewolf"]["high"] < success["start"]["low"], success
