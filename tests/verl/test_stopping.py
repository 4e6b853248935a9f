"""A callback ends verl's training after a step: its checkpoint is written, and the run can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import algorithm, quickstart, train

import agl
from agl.errors import CallbackError, TrainingError

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.timeout(900)]


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


class Failing(agl.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, run: Any, entry: Any) -> None:
        self.steps = [h["step"] for h in run.history]
        raise ValueError("a bug of the user's")


def test_separate_servers_stop_and_resume_and_a_callback_that_raises_ends_them(
    tiny_policy: Path, tmp_path: Path, left_clean: None
) -> None:
    def run(*callbacks: agl.Callback, resume: bool) -> agl.Result:
        verl = algorithm(
            tiny_policy, mode="separate_async", rollout_gpus=1, steps=3, checkpoint_every=3, group_size=4, batch_size=4,
            val_before_train=False,
        )  # fmt: skip
        return train(quickstart(), verl, tmp_path, heldout=4, resume=resume, callbacks=callbacks)

    stopped = run(agl.EarlyStopping("train/reward", patience=1, min_delta=1.0), resume=False)
    assert [h["step"] for h in stopped.history] == [1, 2]
    assert stopped.stop_reason is not None
    assert stopped.checkpoint is not None
    assert stopped.checkpoint.name == "global_step_2"

    failing = Failing()
    with pytest.raises(CallbackError, match="a bug of the user's"):
        run(failing, resume=True)
    assert failing.steps == [1, 2, 3]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_an_update_that_hangs_is_named(tiny_policy: Path, tmp_path: Path, left_clean: None) -> None:
    verl = algorithm(
        tiny_policy, {"trainer.checkpoint_callback_class": "stuck.Stuck"}, steps=2, checkpoint_every=1, group_size=4,
        batch_size=4, val_before_train=False, update_timeout=5.0,
    )  # fmt: skip
    with pytest.raises(TrainingError, match=r"(?s)the weight update after step 1 was not over after 5 s.*update_time"):
        train(quickstart(), verl, tmp_path, heldout=4)
