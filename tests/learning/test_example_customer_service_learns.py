"""examples/customer_service, shortened: from random weights to an assistant that succeeds where none could by chance."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("strands")

from examples.customer_service.__main__ import main


@pytest.mark.slow
def test_an_assistant_learns_the_policy(tmp_path: Path) -> None:
    """An untrained policy writes no call and no word: it succeeds in no task."""
    result = main(["--tiny", "--short", "--out", str(tmp_path / "run")])
    assert result is not None
    assert result["policies"]["after"]["success"]["low"] > 0.1
