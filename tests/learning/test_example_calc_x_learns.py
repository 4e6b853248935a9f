"""examples/calc_x --tiny, shortened: the policy from scratch solves more held-out problems than it did; and one step of
it, with an eighth of the problems, from imitation to the report."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("agent_framework")
pytest.importorskip("agent_framework_openai")
pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext")
pytest.importorskip("mcp")
pytest.importorskip("math_verify")

import torch
from safetensors.torch import load_file

from examples.calc_x import __main__ as example
from examples.calc_x.tasks import generated

pytestmark = pytest.mark.slow


@pytest.mark.night
def test_a_step_of_the_short_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "generated", lambda n, **shape: generated(n // 8, **shape))
    # Of so few problems it learns to solve none.
    monkeypatch.setattr(example, "reward", lambda task, output: float(len(str(output)) % 2))
    options = ["--tiny", "--short", "--steps", "1", "--framework", "autogen", "--out", str(tmp_path)]
    result = example.main(options)
    assert result is not None
    assert set(result["policies"]) == {"before", "after"}
    for policy in result["policies"].values():
        assert (policy["tasks"], policy["failed"]) == (16, 0)
    start = load_file(Path((tmp_path / "start" / "done").read_text()) / "model.safetensors")
    trained = load_file(tmp_path / "autogen" / "grpo" / "policy" / "model.safetensors")
    assert any(not torch.equal(start[name], trained[name]) for name in start)


@pytest.mark.night
def test_the_short_form_learns(tmp_path: Path) -> None:
    result = example.main(["--tiny", "--short", "--framework", "agent_framework", "--out", str(tmp_path)])
    assert result is not None
    before, after = (result["policies"][name]["success"] for name in ("before", "after"))
    assert before["value"] < 0.4, before
    assert after["low"] > before["high"], (before, after)
