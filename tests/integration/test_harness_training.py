"""A coding agent is trained: mini-swe-agent, the real program, on the quickstart's policy, for one step of GRPO."""

from __future__ import annotations

from pathlib import Path

import pytest
from coding_agents import BY_NAME, PROGRAMS

import agl

CONFIG = """\
agent: {system_template: "Use bash.", instance_template: "{{task}}", step_limit: 2, cost_limit: 0, mode: yolo}
model:
  observation_template: "{{output.output}}"
  format_error_template: "No."
  model_kwargs: {drop_params: true}
"""
SCRIPT = 'exec mini -c config.yaml -m openai/policy --exit-immediately -t "$AGL_TASK" -o trajectory.json'


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

    def letters(task: str, output: str) -> float:
        return sum(map(str.isalpha, output)) % 100 / 100

    agent = agl.CommandAgent(["sh", "-c", SCRIPT], reward=letters, name="mini", cwd=work, env=environment)
    algorithm = agl.GRPO(
        model=str(tiny_policy), group_size=4, batch_size=1, steps=1, learning_rate=5e-4, max_response_tokens=24,
        max_context=1024, threads=1,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=2, directory=tmp_path / "run", progress=False, max_attempts=1)
    history = trainer.fit(agent, ["What is 12 * 3?"]).history
    step = history[-1]
    assert step["train/failed_rollouts"] == 0
    assert step["train/forks"] == 0
    assert step["train/tokens"] > 0, step
    print({k: v for k, v in step.items()})
