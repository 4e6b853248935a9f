"""`agl quickstart --real` with SmolLM2-135M-Instruct itself: in a step each here, whole every night."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agl.trainer.quickstart import real
from agl.trainer.quickstart.real import Size, run
from agl.trainer.quickstart.smollm2 import smollm2_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> str:
    return str(smollm2_file())


def test_a_pretrained_model_imitates_and_trains(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real, "SETTINGS", {**real.SETTINGS, "max_response_tokens": 32, "threads": 1})
    monkeypatch.setenv("COLUMNS", "1000")
    small = Size(expert=2, heldout=1, batch=1, group=2)
    facts = run(tmp_path, model=model, steps=1, n_workers=4, progress=False, size=small)
    assert facts["parameters"] == 134_515_008
    assert facts["before"] == 0.0
    policy = Path(facts["policy"])
    assert "<tool_call>" in (policy / "chat_template.jinja").read_text()
    # The line that it prints at its end: the trained agent answers.
    (line,) = re.findall(r"^ +agl (run .+)$", capsys.readouterr().out, re.MULTILINE)
    agl = [sys.executable, "-c", "from agl.trainer.cli import main; main()"]
    words = [sys.executable if word == "python" else word for word in shlex.split(line)]
    said = subprocess.run([*agl, *words], capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    asked, answered = said.stdout.split("What is 417 * 286?")
    assert "Human Message" in asked
    assert re.search(r"Ai Message =+\n.*\S", answered, re.DOTALL), "the policy said something"


@pytest.mark.night
@pytest.mark.parametrize("seed", [0, 1])
def test_it_ends_above_ninety_percent(seed: int, model: str, tmp_path: Path) -> None:
    facts = run(tmp_path, model=model, seed=seed, progress=False)
    assert facts["before"] < 0.05
    assert facts["after"] >= 0.9
