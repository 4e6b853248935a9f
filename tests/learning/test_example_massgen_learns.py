"""examples/massgen: `agent_a` learns to agree, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.massgen.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.night]


def test_held_out_agreement_rises(tmp_path: Path) -> None:
    result = main(["--tiny", "--short", "--out", str(tmp_path / "out")])
    assert result is not None
    before, after = (result["policies"][name]["success"] for name in ("before", "after"))
    assert before["value"] < 0.5 < after["low"]
