"""`examples/rag`, shortened: a policy from scratch answers held-out questions that nobody can without searching."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("agents")
pytest.importorskip("mcp")

from examples.rag.__main__ import main

pytestmark = pytest.mark.slow


def test_it_learns_to_search(tmp_path: Path) -> None:
    result = main(["--tiny", "--short", "--out", str(tmp_path / "run")])
    assert result is not None
    policies = result["policies"]
    assert policies["after"]["success"]["low"] > 0.1, policies
    assert policies["after, no tool"]["success"]["high"] < 0.1, policies
