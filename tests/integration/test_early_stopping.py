"""Callbacks see a real training and may end it, with nothing lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tiny_run import train

import agl
from agl.errors import CallbackError
from agl.trainer.store import open_store


class Seen(agl.Callback):
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_start(self, run: Any) -> None:
        self.calls.append(("start", run.step, run.steps, run.val_tasks))

    def on_step(self, run: Any, entry: Any) -> None:
        assert run.history[-1] == entry
        with pytest.raises(TypeError):
            entry["train/reward"] = 1.0
        self.calls.append(("step", entry["step"]))

    def on_validation(self, run: Any, entry: Any) -> None:
        self.calls.append(("validation", entry["step"]))

    def on_checkpoint(self, run: Any, path: Path, step: int) -> None:
        assert (path / "run.json").is_file()
        self.calls.append(("checkpoint", step))

    def on_end(self, run: Any, status: str) -> None:
        self.calls.append(("end", status))


@pytest.mark.slow
def test_early_stopping_ends_a_run_and_does_the_same_when_resumed(untrained_model: Path, tmp_path: Path) -> None:
    seen = Seen()

    def run(*, resume: bool) -> agl.Result:
        # No reward rises by 10, so that the patience alone decides.
        callbacks = [seen, agl.EarlyStopping(patience=2, min_delta=10.0)]
        return train(untrained_model, tmp_path, steps=8, every=10, resume=resume, callbacks=callbacks, name="mine")

    early = run(resume=False)
    assert seen.calls == [
        ("start", 0, 8, 1), ("validation", 0), ("step", 1), ("validation", 1), ("step", 2), ("validation", 2),
        ("checkpoint", 2), ("end", "succeeded"),
    ]  # fmt: skip
    assert early.stop_reason is not None
    assert early.stop_reason.startswith("val/reward has not improved in 2 values")
    assert early.policy is not None
    assert (early.policy / "config.json").is_file()
    assert early.checkpoint is not None
    assert early.checkpoint.name == "step-000002"

    async def recorded() -> Any:
        store = await open_store(early.store)
        try:
            (record,) = await store.query_runs()
            return record
        finally:
            await store.close()

    record = asyncio.run(recorded())
    assert (record.name, record.status, record.step, record.steps) == ("mine", "succeeded", 2, 8)

    assert run(resume=True) == early
    assert seen.calls[8:] == [("start", 2, 8, 1), ("end", "succeeded")]


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_run_and_the_step_is_saved(untrained_model: Path, tmp_path: Path) -> None:
    class Broken(agl.Callback):
        def on_step(self, run: Any, entry: Any) -> None:
            raise ZeroDivisionError("my bug")

    with pytest.raises(CallbackError) as caught:
        train(untrained_model, tmp_path, steps=2, every=10, callbacks=Broken())
    message = str(caught.value)
    assert all(part in message for part in ("ZeroDivisionError: my bug", "Broken.on_step", "step=1", "resume=True"))
    assert (tmp_path / "checkpoints" / "step-000001" / "run.json").is_file()
    resumed = train(untrained_model, tmp_path, steps=2, every=10, resume=True)
    assert [h["step"] for h in resumed.history] == [0, 1, 2]
