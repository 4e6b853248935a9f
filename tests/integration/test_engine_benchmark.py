"""The short form of `benchmarks/engine.py --model`, without the rivals that are not installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT


@pytest.mark.night
def test_engines_are_compared_on_a_model(untrained_model: Path, tmp_path: Path) -> None:
    sides = ["agl", "agl, policy process", "agl, int8 linear", "transformers, static batch"]
    small = ["--agents", "3", "--answer-tokens", "6", "--repeats", "1"]
    command = [sys.executable, ROOT / "benchmarks" / "engine.py", "--model", untrained_model, *small]
    file = tmp_path / "facts.json"
    done = subprocess.run(
        [*command, "--sides", *sides, "llama.cpp", "vLLM", "--json", file], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(file.read_text())
    rows = {row["side"]: row for row in facts["rows"]}
    assert list(rows)[:4] == sides
    assert all(
        row["tokens_per_second"] > 0 and row["first_token"] > 0 and row["peak_bytes"] > 1 << 26 for row in rows.values()
    )
    assert all(rows[side]["drift"] < 1e-4 for side in sides[:2])
    assert 1e-4 < rows["agl, int8 linear"]["drift"] < 1e-1
    assert "llama.cpp: the model is not a GGUF file" in done.stdout
    assert ("vLLM" in facts["missing"]) == (importlib.util.find_spec("vllm") is None)
