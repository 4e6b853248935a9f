"""`examples/strands_tito` as three programs: a server, a runner, an algorithm."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from processes import AGL, Programs, fetch, free_port, programs

from agl.testing.provider import Reply, serve

pytest.importorskip("strands")

EXAMPLE = ROOT / "examples" / "strands_tito"
SECONDS = 150

pytestmark = pytest.mark.slow


def _algorithm(at: Programs, url: str, *words: object) -> dict[str, float]:
    """Start a runner and the algorithm; what that prints."""
    runner = at.start(*AGL, "runner", "--store", url, "--agent", EXAMPLE / "agent.py:my_rollout", "--n-workers", 4,
                      log="runner.log")  # fmt: skip
    algorithm = at.start(sys.executable, EXAMPLE / "algorithm.py", "--store", url, *words, log="algorithm.log")
    at.until(lambda: algorithm.poll() is not None or runner.poll() is not None, SECONDS, "the algorithm")
    text = at.text("algorithm.log")
    assert algorithm.returncode == 0, text + at.text("runner.log") + at.text("server.log")
    assert "0 failed" in text, text + at.text("runner.log")
    return {
        name: float(value)
        for name, value in re.findall(r"^(accuracy|TITO rate) +([\d.]+)%(?: \[.*\])?$", text, re.MULTILINE)
    }


@pytest.mark.night
def test_a_policy_that_is_served_is_evaluated_token_by_token(tiny_policy: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with programs(tmp_path) as at:
        at.start(*AGL, "serve", "--model", tiny_policy, "--gpus", 0, "--port", port, log="server.log")
        at.until(lambda: fetch(f"{url}/health")[0] == 200, SECONDS, "the server")
        found = _algorithm(at, url, "--tasks", 32)
        calls = int(re.findall(r"(\d+) calls", at.text("algorithm.log"))[0])
    assert found["TITO rate"] == 100.0
    # The policy was taught to answer about a quarter of such questions, always by the calculator.
    assert 0.0 < found["accuracy"] < 100.0
    assert calls > 32


def test_a_store_alone_with_a_model_elsewhere(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def script(body: dict[str, Any]) -> Reply:
        messages = json.dumps(body["messages"])
        question = re.findall(r"What is (\d+ [-+*] \d+)\?", messages)[-1]
        tool = [m for m in body["messages"] if m["role"] == "tool"]
        if tool:
            return Reply(f"It is {tool[-1]['content']}.")
        return Reply(None, (("calculator", {"expression": question}),))

    with serve(script) as model, programs(tmp_path) as at:
        at.start(*AGL, "store", "--port", port, "--db", tmp_path / "store.db", log="server.log")
        at.until(lambda: fetch(f"{url}/health")[0] == 200, SECONDS, "the store")
        found = _algorithm(at, url, "--tasks", 8, "--llm", model.url)
        assert len(model.seen) == 16
    assert found == {"accuracy": 100.0, "TITO rate": 0.0}
