"""examples/calc_x --tiny, shortened: the policy from scratch solves more held-out problems than it did."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("agent_framework")
pytest.importorskip("agent_framework_openai")
pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext")
pytest.importorskip("mcp")
pytest.importorskip("math_verify")

from examples.calc_x import __main__ as example

pytestmark = pytest.mark.slow


def test_the_short_form_learns(tmp_path: Path) -> None:
    result = example.main(["--tiny", "--short", "--framework", "agent_framework", "--out", str(tmp_path)])
    assert result is not None
    before, after = (result["policies"][name]["success"] for name in ("before", "after"))
    assert before["value"] < 0.4, before
    assert after["low"] > before["high"], (before, after)
