"""Coding agents are trained, the real programs on the quickstart's policy, for one step of GRPO."""

from __future__ import annotations

from pathlib import Path

import pytest
from coding_agents import AGENTS, BY_NAME, PROGRAMS, CodingAgent
from documents import blocks
from harness_runs import lengthened, train

import agl
from agl_harnesses import Attempt, Harness
from agl_harnesses.report import agents, table

pytestmark = pytest.mark.slow

# The policy knows numbers, not commands: what it runs is a number, of which the shell says that it is no program.
CONFIG = r"""
agent: {system_template: "Calculate.", instance_template: "{{task}}", step_limit: 2, cost_limit: 0, mode: yolo}
model:
  model_class: litellm_textbased
  action_regex: '^\D*([0-9]{1,9})'
  observation_template: "status {{output.returncode}}"
  format_error_template: "No."
  model_kwargs: {drop_params: true}
"""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if BY_NAME["mini"].path is None:
        pytest.skip("mini is not installed: tests/harnesses/install.sh DIR mini, then AGL_HARNESSES=DIR")
    monkeypatch.setenv("PATH", str(PROGRAMS), prepend=":")


@pytest.mark.usefixtures("programs")
def test_mini_swe_agent_learns_for_a_step(tiny_policy: Path, tmp_path: Path) -> None:
    rewards: dict[Path, float] = {}

    def written(task: str, folder: Path) -> float:
        """What mini notes of itself, so that rewards differ: how many digits its policy said."""
        assert (folder / "notes.txt").read_text() == "2 + 2\n"
        rewards[folder] = sum(map(str.isdigit, (folder / "said.json").read_text())) / 100
        return rewards[folder]

    agent = agl.harness(
        "mini-swe-agent", task=str, files=lambda task: {"notes.txt": "2 + 2\n"}, grade=written,
        words=["-c", "/tmp/home/short.yaml", "-o", "/tmp/work/said.json"], home={"short.yaml": CONFIG},
    )  # fmt: skip
    algorithm = agl.GRPO(
        model=str(tiny_policy), group_size=4, batch_size=1, steps=1, learning_rate=5e-4, max_response_tokens=24,
        max_context=1024, temperature=1.5, threads=1,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=2, directory=tmp_path / "run", progress=False, max_attempts=1)
    result = trainer.fit(agent, ["What is 12 * 3?"])
    step = result.history[-1]
    assert step["train/failed_rollouts"] == 0
    assert step["train/forks"] == 0, "its histories continue token for token"
    assert (step["train/calls"], step["train/rows"]) == (8, 4), "two calls of a rollout make one row"
    assert step["train/tokens"] < step["train/tokens_unmerged"]
    assert step["train/updated_policies"] == 1
    assert step["learner/max_abs_log_ratio"] < 1e-3, "it is trained on the probabilities that it was sampled with"
    assert not any(folder.exists() for folder in rewards), "a working copy ends with its attempt"

    (mini,) = agents(result)
    assert (mini.agent, mini.rollouts, mini.calls, dict(mini.forks)) == ("mini", 4, 8, {})
    assert mini.trained == mini.sampled == step["learner/tokens"] > 0
    assert mini.lost == 0
    assert mini.drift == step["learner/max_abs_log_ratio"]
    print(table([mini]))
    assert table([mini]).splitlines()[2].startswith(f"| mini | 4 | 8 | 0 | {mini.sampled} | {mini.sampled} | 0 | 0 | ")


@pytest.mark.night
@pytest.mark.parametrize("agent", [a for a in AGENTS if a.name != "mini"], ids=lambda agent: agent.name)
def test_each_is_trained_with_its_own_prompts(
    agent: CodingAgent, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if agent.path is None:
        pytest.skip(f"{agent.program} is not installed: tests/harnesses/install.sh DIR, then AGL_HARNESSES=DIR")
    monkeypatch.setenv("PATH", str(PROGRAMS), prepend=":")
    result = train(agent, lengthened(tiny_policy, tmp_path / "policy"), tmp_path / "run")
    found = agents(result)
    assert agent.name in {one.agent for one in found}
    for one in found:
        assert one.sampled > 0
        assert one.trained == one.sampled - one.dropped.total()
        assert one.lost == 0
        assert one.drift is not None
        assert one.drift < 1e-3
    assert result.history[-1]["train/updated_policies"] == 1


LEAVES = """
import json, os, time, urllib.request
def ask(**more):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "7 * 6?"}], **more}).encode()
    url, headers = os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, body, headers))
answer = ask(stream=True)
answer.readline()
answer.close()
time.sleep(2)
ask(max_tokens=4).read()
"""


class Leaver(Harness):
    """A coding agent that does not wait for the end of its first answer."""

    name, programs = "leaver", ("sh",)
    install = "apt-get install dash"

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["-c", "python3 leaves.py"]

    def point(self, attempt: Attempt) -> None:
        attempt.environment["OPENAI_BASE_URL"] = attempt.urls["openai"]


def test_tokens_of_an_answer_that_the_program_left_are_not_lost(untrained_model: Path, tmp_path: Path) -> None:
    rewards = iter((0.0, 1.0))
    agent = agl.harness(Leaver, task=str, files=lambda _: {"leaves.py": LEAVES}, grade=lambda *_: next(rewards))
    algorithm = agl.GRPO(
        model=str(untrained_model), group_size=2, batch_size=1, steps=1, max_response_tokens=400, threads=1
    )
    trainer = agl.Trainer(algorithm, n_workers=1, directory=tmp_path / "run", progress=False, max_attempts=1)
    (found,) = agents(trainer.fit(agent, ["-"]))
    assert (found.rollouts, found.calls) == (2, 4)
    assert found.trained == 8
    assert found.lost == 0
    assert found.dropped.total() == found.sampled - 8 > 0


@pytest.mark.usefixtures("programs")
def test_the_block_of_the_page(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (b for b in blocks() if b.page == "docs/harnesses.md" and b.language == "python")
    algorithm = agl.GRPO(
        model=str(tiny_policy), group_size=2, batch_size=1, steps=1, max_response_tokens=24, max_context=1024, threads=1
    )
    program, tests = "def double(x):\n    return x * x\n", ["assert double(3) == 6", "assert double(2) == 4"]
    task = {"program": program, "visible": "from solution import double\nassert double(3) == 6\n", "hidden": tests}
    names = {"agl": agl, "algorithm": algorithm, "tasks": [task], "config": CONFIG}
    exec(block.text, names)
    (step,) = names["result"].history
    assert step["train/reward"] == 0.5, "one hidden test of two passes as it was"
    assert step["train/failed_rollouts"] == 0
