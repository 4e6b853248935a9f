"""`examples/rag`, shortened: a policy from scratch comes to answer in the form that is asked of it.

What it finds is not learned yet, so this says little, and waits for the night.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("agents")
pytest.importorskip("mcp")

from examples.rag.__main__ import main

pytestmark = pytest.mark.night


def test_it_answers_in_the_form_that_is_asked(tmp_path: Path) -> None:
    result = main(["--tiny", "--short", "--out", str(tmp_path / "run")])
    assert result is not None
    assert result["policies"]["after"]["reward"]["low"] > 0.04, result
    assert result["policies"]["after, no tool"]["success"]["value"] == 0, result
