"""When callbacks end a run, and what is refused of them; `tests/integration/test_early_stopping.py` trains."""

from __future__ import annotations

import gc
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.errors import CallbackError, ConfigError


@agl.rollout
async def agent(task: str) -> float:
    return 1.0


def measure(directory: Path, *callbacks: agl.Callback) -> agl.Result:
    """A baseline of one task."""
    return agl.Trainer(agl.Baseline(), directory=directory, progress=False, callbacks=callbacks).fit(agent, ["a task"])


def broken(method: str) -> agl.Callback:
    """A callback that raises in this method."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("my bug")

    return type("Broken", (agl.Callback,), {method: fail})()


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_end"])
def test_wherever_a_callback_raises_the_run_ends_with_its_error(method: str, tmp_path: Path) -> None:
    with pytest.raises(
        CallbackError, match=rf"ZeroDivisionError: my bug \(callback=Broken\.{method}, step=0\)"
    ) as caught:
        measure(tmp_path, broken(method))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_baseline_goes_on_when_it_is_stopped(tmp_path: Path) -> None:
    class Stop(agl.Callback):
        def on_start(self, run: Any) -> None:
            run.stop("at once")

    assert measure(tmp_path, Stop()).history[0]["train/reward"] == 1.0


@pytest.mark.parametrize("frozen", [False, True])
def test_the_garbage_collector_is_left_as_it_was(frozen: bool, tmp_path: Path) -> None:
    """Who has frozen what lives long keeps it so; of a run nothing stays frozen."""
    during: list[tuple[Any, int]] = []

    class Look(agl.Callback):
        def on_step(self, run: Any, entry: Any) -> None:
            during.append((gc.get_threshold(), gc.get_freeze_count()))

    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        threshold, count = gc.get_threshold(), gc.get_freeze_count()
        measure(tmp_path, Look())
        assert gc.get_threshold() == threshold
        assert during[0][0] != threshold
        # Frozen objects may still end one by one.
        assert 0 < during[0][1] <= (count if frozen else 10**9)
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.freeze()


def test_a_dry_run_has_no_callbacks(tmp_path: Path) -> None:
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False, callbacks=broken("on_start"))
    assert trainer.dev(agent, ["a task"]).history


def test_what_a_callback_measures_is_recorded_with_the_step(tmp_path: Path) -> None:
    class Measure(agl.Callback):
        def on_step(self, run: Any, entry: Any) -> dict[str, float]:
            return {"goal/exploitability": 0.25, "calls": 3}

    result = measure(tmp_path, Measure())
    assert result.history[0].items() >= {"goal/exploitability": 0.25, "calls": 3, "train/reward": 1.0}.items()
    with sqlite3.connect(tmp_path / "run.db") as store:
        kept = dict(store.execute("SELECT name, value FROM metrics WHERE name IN ('goal/exploitability', 'calls')"))
    assert kept == {"goal/exploitability": 0.25, "calls": 3.0}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"train/reward": 1.0}, "'train/reward' is recorded already"),
        ({"goal/x": "high"}, "it returned 'high' as 'goal/x'"),
        ({"goal/x": True}, "it returned True as 'goal/x'"),
        (0.5, "it returned 0.5"),
    ],
)
def test_what_is_no_measurement_ends_the_run(found: Any, reason: str, tmp_path: Path) -> None:
    callback = type("Measure", (agl.Callback,), {"on_step": lambda *_: found})()
    with pytest.raises(ConfigError, match=reason):
        measure(tmp_path, callback)


class View:
    """What `EarlyStopping` reads of a run."""

    def __init__(self, values: list[float], val_tasks: int = 1) -> None:
        self.history = [{"step": i, "val/reward": value} for i, value in enumerate(values)]
        self.val_tasks = val_tasks
        self.reason: str | None = None

    def stop(self, reason: str) -> None:
        self.reason = reason


@pytest.mark.parametrize(
    ("values", "options", "stops"),
    [
        ([1, 2, 3, 4], {}, False),
        ([4, 3, 2], {}, False),
        ([4, 3, 2, 1], {}, True),
        ([4, 3, 5, 4, 4], {}, False),
        ([4, 3, 5, 4, 4, 5], {}, True),
        ([4, 3, 2, 1], {"mode": "min"}, False),
        ([1, 2, 3, 4], {"mode": "min"}, True),
        ([1, 1.5, 2], {"min_delta": 1.0, "patience": 2}, True),
        ([1, 1.5, 2.5], {"min_delta": 1.0, "patience": 2}, False),
        ([4, 3, 2, 1], {"min_steps": 4}, False),
        ([4, 3, 2, 1, 1], {"min_steps": 4}, True),
        ([math.nan, math.nan, math.nan], {}, True),
        ([math.nan, math.nan, 1, 0, 0], {}, False),
    ],
)
def test_when_early_stopping_stops(values: list[float], options: dict[str, Any], stops: bool) -> None:
    view: Any = View(values)
    agl.EarlyStopping(**options).on_start(view)
    assert (view.reason is not None) == stops


def test_early_stopping_needs_its_metric(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the run has no validation") as caught:
        measure(tmp_path, agl.EarlyStopping())
    assert "val_dataset" in str(caught.value)
    with pytest.raises(ConfigError, match="which the run does not have") as caught:
        measure(tmp_path, agl.EarlyStopping("train/rewrd"))
    assert "did you mean 'train/reward'?" in str(caught.value)
    assert "EarlyStopping.on_step" in str(caught.value)


def test_a_metric_of_the_learner_may_be_missing_where_there_was_no_update() -> None:
    view: Any = View([])
    agl.EarlyStopping("learner/kl").on_step(view, {"step": 1, "train/reward": 0.0})
    with pytest.raises(ConfigError, match="'learner/kl'"):
        agl.EarlyStopping("learner/kl").on_step(view, {"step": 1, "learner/loss": 0.0})


def test_what_is_no_callback_is_refused() -> None:
    class Late(agl.Callback):
        async def on_step(self, run: Any, entry: Any) -> None: ...

    algorithm = agl.Baseline()
    for wrong in ([print], agl.EarlyStopping, "early"):
        with pytest.raises(ConfigError, match=r"which is not an agl\.Callback"):
            agl.Trainer(algorithm, callbacks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Late\.on_step is async"):
        agl.Trainer(algorithm, callbacks=Late())
    for options in ({"mode": "maximum"}, {"patience": 0}, {"patience": 1.5}, {"min_delta": -1.0}, {"min_steps": -1}):
        with pytest.raises(ConfigError):
            agl.EarlyStopping(**options)  # type: ignore[arg-type]
