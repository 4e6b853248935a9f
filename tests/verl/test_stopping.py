"""A callback ends verl's training after a step: its checkpoint is written, and the run can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import algorithm, quickstart, train

import agl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class StopAfterOne(agl.Callback):
    """Reads the history alone, as `agl.EarlyStopping` does."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_start(self, run: Any) -> None:
        self.calls.append(("start", run.step))
        if run.step >= 1:
            run.stop("enough")

    def on_step(self, run: Any, entry: Any) -> None:
        self.calls.append(("step", entry["step"]))
        run.stop("enough")

    def on_checkpoint(self, run: Any, path: Path, step: int) -> None:
        self.calls.append(("checkpoint", step))


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_stopped_run_has_its_checkpoint_and_policy(
    mode: str, tiny_policy: Path, tmp_path: Path, left_clean: None
) -> None:
    def run(*callbacks: agl.Callback, resume: bool) -> agl.Result:
        verl = algorithm(
            tiny_policy, {"trainer.v1.trainer_mode": mode}, steps=4, checkpoint_every=4, group_size=4, batch_size=4
        )
        return train(quickstart(), verl, tmp_path, heldout=4, resume=resume, callbacks=callbacks)

    stop = StopAfterOne()
    stopped = run(stop, resume=False)
    assert stop.calls == [("start", 0), ("step", 1), ("checkpoint", 1)]
    assert stopped.stop_reason == "enough"
    assert [h["step"] for h in stopped.history if "train/reward" in h] == [1]
    assert stopped.policy is not None
    assert list(stopped.policy.glob("*.safetensors"))
    assert stopped.checkpoint is not None
    assert stopped.checkpoint.name == "global_step_1"
    if mode != "sync":
        return

    again = run(stop, resume=True)
    assert stop.calls[3:] == [("start", 1)]
    assert (again.history, again.stop_reason) == (stopped.history, "enough")
