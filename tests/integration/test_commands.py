"""`agl.CommandAgent`: one process per rollout, what it is given, what becomes of its output, and that it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.errors import AglError, ConfigError
from agl.testing.provider import serve

SHOWS = """
import json, os, sys
task = json.load(sys.stdin)
assert task == json.loads(os.environ["AGL_TASK"])
assert os.environ["AGL_ROLLOUT_ID"].startswith("ro-") and os.environ["AGL_ATTEMPT"] == "1"
print(task["question"].upper())
"""


def _run(tmp_path: Path, agent: agl.Agent, **options: Any) -> tuple[agl.Result, list[dict[str, Any]]]:
    settings: Any = {"n_workers": 2, "directory": tmp_path / "run", "progress": False, "max_attempts": 1, **options}
    result = agl.Trainer(agl.Baseline(), **settings).fit(agent, [{"question": "one"}, {"question": "two"}])
    return result, result.history


def _agent(text: str, **options: Any) -> agl.CommandAgent:
    settings: Any = {"reward": lambda task, output: float(output == task["question"].upper()), "name": "it", **options}
    return agl.CommandAgent([sys.executable, "-c", text], **settings)


def test_its_output_is_scored(tmp_path: Path) -> None:
    _, history = _run(tmp_path, _agent(SHOWS))
    assert history[0]["train/reward"] == 1.0


def test_what_it_says_in_failing_is_the_error(tmp_path: Path) -> None:
    with pytest.raises(AglError, match=r"(?s)exit status 3.*out of cheese"):
        _run(tmp_path, _agent("import sys; print('out of cheese', file=sys.stderr); sys.exit(3)"))


def test_a_failure_can_be_an_outcome(tmp_path: Path) -> None:
    _, history = _run(tmp_path, _agent("raise SystemExit(3)", error_reward=-1.0))
    assert history[0]["train/reward"] == -1.0


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AglError, match="'no-such-program' cannot be run"):
        _run(tmp_path, agl.CommandAgent(["no-such-program"], reward=lambda task, output: 0.0))


def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    """A time-out kills the whole process group, and so does the command's own end."""
    beat = "import time, sys\nwhile True:\n    open(sys.argv[1], 'a').write('x'); time.sleep(0.05)"
    spawn = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {beat!r}, sys.argv[1]])\n"
    for name, rest in (("ended", "import time; time.sleep(0.5)"), ("hangs", "import time; time.sleep(60)")):
        file = tmp_path / name
        agent = agl.CommandAgent([sys.executable, "-c", spawn + rest, str(file)], reward=lambda t, o: 1.0, name="it")
        options: dict[str, Any] = {"directory": tmp_path / f"run-{name}", "timeout": 30.0 if name == "ended" else 5.0}
        if name == "hangs":
            with pytest.raises(AglError, match="past its limit"):
                _run(tmp_path, agent, **options)
        else:
            _run(tmp_path, agent, **options)
        time.sleep(0.5)
        size = file.stat().st_size if file.exists() else 0
        time.sleep(0.5)
        assert (file.stat().st_size if file.exists() else 0) == size


def test_an_agent_that_is_not_trained_keeps_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
        text = "import openai\nprint(openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', "
        text += "'content': 'q'}]).choices[0].message.content)"
        named = ["OPENAI_BASE_URL", "OPENAI_API_KEY"]
        with pytest.raises(AglError, match=r"(?s)OPENAI_API_KEY.*set here, but passed on to a command only by env="):
            _run(tmp_path / "unnamed", _agent(text))
        _, history = _run(tmp_path, _agent(text, reward=lambda task, output: float(output == "hi"), env=named))
        assert history[0]["train/reward"] == 1.0
        assert {s.headers["authorization"] for s in provider.seen} == {"Bearer sk-own"}


@pytest.mark.parametrize("command", [[], "", "node agent.mjs"])
def test_commands_that_are_none(command: Any) -> None:
    with pytest.raises(ConfigError):
        agl.CommandAgent(command, reward=lambda task, output: 0.0)


def test_names() -> None:
    score = lambda task, output: 0.0  # noqa: E731
    assert agl.CommandAgent(["node", "--no-warnings", "src/agent.mjs", "x"], reward=score).name == "agent"
    assert agl.CommandAgent("./solve", reward=score).name == "solve"
