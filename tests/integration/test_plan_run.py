"""`agl plan --from` a run that was just made, and the large example of docs/plan.md."""

from __future__ import annotations

import json
from pathlib import Path

import documents
import pytest
from plan_page import printed, shown_below
from tiny_run import TRAIN, agent, train
from typer.testing import CliRunner

import agl
from agl.errors import ConfigError
from agl.trainer.cli.app import app

SMALL = {"group_size": 2, "batch_size": 2, "max_context": 128}


def test_a_run_is_measured_and_simulated(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(untrained_model, tmp_path / "agl-runs" / "a", steps=3)
    [block] = [b for b in documents.blocks() if b.page == "docs/plan.md" and "--from" in b.text and b.language]
    [(_, *arguments)] = documents.commands(block.text)
    done = CliRunner().invoke(app, [*arguments, "--json", "plan.json"], catch_exceptions=False)
    assert done.exit_code == 0
    facts = json.loads(Path("plan.json").read_text())
    took = [entry["seconds"] for entry in result.history if entry["step"]]
    assert facts["computed_from"]["seconds"] == pytest.approx(sum(took) / 3)
    assert facts["computed_from"]["rollouts"] == sum(e.get("train/rollouts", 0) for e in result.history)
    synchronous, stale = facts["layouts"]
    assert [row["staleness"] for row in facts["layouts"]] == [0, 4]
    assert synchronous["seconds"] == pytest.approx(sum(took) / 3, rel=0.5), "agents without tools only compute"
    assert stale["seconds"] <= synchronous["seconds"] * 1.2


def test_a_run_whose_phases_overlap_is_refused(untrained_model: Path, tmp_path: Path) -> None:
    algorithm = agl.GRPO(model=str(untrained_model), steps=2, max_response_tokens=6, max_staleness=1, **SMALL)
    agl.Trainer(algorithm, directory=tmp_path / "a", progress=False).fit(agent, TRAIN)
    with pytest.raises(ConfigError, match=r"is not synchronous\n  -> --from DIRECTORY of a run"):
        CliRunner().invoke(app, ["plan", "--from", str(tmp_path / "a")], catch_exceptions=False)


@pytest.mark.slow
def test_what_10_000_agents_need_is_what_the_page_shows() -> None:
    [block] = [
        b for b in documents.blocks() if b.page == "docs/plan.md" and "gpus=64" in b.text and b.language == "bash"
    ]
    assert printed(block.text) == shown_below(block)
