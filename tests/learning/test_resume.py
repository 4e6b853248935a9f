"""A run that was stopped goes on as if it had never stopped: same weights, optimiser, order, sampling; to the bit."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import agl
from agl.errors import CheckpointError
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer

# The processes of a run that goes on have another hash seed than those before.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("executed_policies")]


def _fit(
    policy: Path,
    directory: Path,
    *,
    algorithm: Any = agl.GRPO,
    resume: bool = False,
    learning_rate: float = 5e-4,
    max_staleness: int = 0,
    task_sampling: Any = "uniform",
    memory: agl.Memory | None = None,
) -> agl.Result:
    trainer = agl.Trainer(
        algorithm(
            model=str(policy), group_size=4, batch_size=2, steps=3, learning_rate=learning_rate, schedule="linear",
            max_response_tokens=48, max_context=256, val_every=3, max_staleness=max_staleness,
            task_sampling=task_sampling,
        ),
        n_workers=1,
        directory=directory,
        seed=3,
        progress=False,
    )  # fmt: skip
    train = arithmetic_tasks(64, seed=0, split="train")
    val = arithmetic_tasks(2, seed=0, split="heldout")
    use = None if memory is None else memory.per("agent")
    return trainer.fit(agl.wrap(build_agent(), reward=exact_answer, memory=use), train, val, resume=resume)


def _interrupt_when(path: Path) -> None:
    def wait() -> None:
        while not path.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


_SAME_EVERY_TIME = ("step", "train/reward", "val/reward", "train/tokens", "learner/loss", "learner/grad_norm")


def _facts(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: h[k] for k in _SAME_EVERY_TIME if k in h} for h in history]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [(agl.GRPO, {"task_sampling": "learnability"}), (agl.REINFORCE, {"max_staleness": 1})],
)
def test_a_resumed_run_equals_one_never_stopped(
    algorithm: Any, options: dict[str, Any], tiny_policy: Path, tmp_path: Path, no_process_left: None
) -> None:
    remembered, memory = agl.Memory(keep=6), agl.Memory(keep=6)
    whole = _fit(tiny_policy, tmp_path / "whole", algorithm=algorithm, memory=remembered, **options)
    _interrupt_when(tmp_path / "stopped" / "checkpoints" / "step-000001")
    with pytest.raises(KeyboardInterrupt):
        _fit(tiny_policy, tmp_path / "stopped", algorithm=algorithm, memory=memory, **options)
    stopped = json.loads((tmp_path / "stopped" / "checkpoints" / "step-000001" / "run.json").read_text())
    assert stopped["step"] == 1
    resumed = _fit(tiny_policy, tmp_path / "stopped", algorithm=algorithm, resume=True, memory=memory, **options)
    episodes = [[(e.key, e.text, e.reward) for e in each.entries()] for each in (remembered, memory)]
    assert len(episodes[0]) == 6
    assert episodes[0] == episodes[1], "what was learned in text is the same, too"

    assert whole.history[-1]["policy_version"] > whole.history[1]["policy_version"] > 0, "both parts have updates"
    assert _facts(resumed.history) == _facts(whole.history)
    assert resumed.run_id == stopped["run_id"]
    assert whole.policy is not None
    assert resumed.policy is not None
    expected, got = load_file(whole.policy / "model.safetensors"), load_file(resumed.policy / "model.safetensors")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert whole.checkpoint is not None
    assert resumed.checkpoint is not None
    states = [
        torch.load(r.checkpoint / "states" / "policy.pt", weights_only=False) for r in (whole, resumed) if r.checkpoint
    ]
    assert _equal(*states)

    with pytest.raises(CheckpointError, match=r"other settings \(learning_rate: 0\.0005 -> 0\.001\)"):
        _fit(
            tiny_policy,
            tmp_path / "stopped",
            algorithm=algorithm,
            resume=True,
            learning_rate=1e-3,
            **options,
        )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b
