"""A coding agent is trained: mini-swe-agent, the real program, on the quickstart's policy, for one step of GRPO."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coding_agents import BY_NAME, PROGRAMS

import agl

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
OUT = "$AGL_ROLLOUT_ID.json"
SCRIPT = f'mini -c config.yaml -m openai/policy --exit-immediately -t "$AGL_TASK" -o {OUT} >log && cat {OUT}'


@pytest.mark.slow
def test_mini_swe_agent_learns_for_a_step(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if BY_NAME["mini"].path is None:
        pytest.skip("mini is not installed: tests/harnesses/install.sh DIR mini, then AGL_HARNESSES=DIR")
    work = tmp_path / "work"
    work.mkdir()
    (work / "config.yaml").write_text(CONFIG)
    monkeypatch.setenv("PATH", str(PROGRAMS), prepend=":")
    environment = {
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "config"),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }

    def digits(task: str, output: str) -> float:
        answers = [message for message in json.loads(output)["messages"] if message["role"] == "assistant"]
        said = "".join(message["content"] for message in answers)
        return sum(map(str.isdigit, said)) / 100

    agent = agl.CommandAgent(["sh", "-c", SCRIPT], reward=digits, name="mini", cwd=work, env=environment)
    algorithm = agl.GRPO(
        model=str(tiny_policy), group_size=4, batch_size=1, steps=1, learning_rate=5e-4, max_response_tokens=24,
        max_context=1024, temperature=1.5, threads=1,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=2, directory=tmp_path / "run", progress=False, max_attempts=1)
    history = trainer.fit(agent, ["What is 12 * 3?"]).history
    step = history[-1]
    assert step["train/failed_rollouts"] == 0
    assert step["train/forks"] == 0
    assert step["train/forks"] == 0, "its histories continue token for token"
    assert (step["train/calls"], step["train/rows"]) == (8, 4), "two calls of a rollout make one row"
    assert step["train/tokens"] < step["train/tokens_unmerged"]
    assert step["train/updated_policies"] == 1
    assert step["learner/max_abs_log_ratio"] < 1e-3, "it is trained on the probabilities that it was sampled with"
