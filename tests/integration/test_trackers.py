"""The trackers themselves have what the history has, of a run that was killed and resumed, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_run import SECRET, train, train_killed
from tracker_files import (
    bytes_of,
    history_steps,
    mlflow_runs,
    tensorboard_steps,
    trackio_steps,
    wandb_sessions,
)

from agl.trainer.loggers.choose import TRACKERS as TRACKERS_BY_NAME

TRACKERS = [
    name for name, tracker in TRACKERS_BY_NAME.items() if find_spec(tracker.module.partition(".")[0]) is not None
]


@pytest.fixture
def trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """MLflow's address; all trackers keep their files below the test's directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where Trackio keeps its files: it reads the variable when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trackio")
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


@pytest.mark.night
@pytest.mark.slow
def test_trackers_have_the_history_of_a_run_that_was_killed_and_resumed(
    untrained_model: Path, tmp_path: Path, trackers: str, trackio_folder: Path
) -> None:
    directory = tmp_path / "run"
    # Killed after step 3, with a checkpoint of step 2: step 3 is done twice.
    train_killed(
        untrained_model, directory, after=3, steps=4, every=2, options=f"log={TRACKERS}, project='p', name='n'"
    )
    where = {
        "wandb": directory / "wandb", "mlflow": tmp_path / "mlruns", "tensorboard": directory / "tensorboard",
        "trackio": trackio_folder,
    }  # fmt: skip
    assert SECRET.encode() in bytes_of(directory), "the store has the texts"
    for name in TRACKERS:
        assert SECRET.encode() not in bytes_of(where[name]), f"{name} was not asked to keep texts"

    log = [TRACKERS_BY_NAME[name](samples=1) for name in TRACKERS]
    result = train(untrained_model, directory, steps=4, every=2, resume=True, log=log, project="p", name="n")
    history = history_steps(result.history)
    assert list(history) == [0, 1, 2, 3, 4]
    # Step 3 was measured twice; trackers that cannot take a value back keep the first one's seconds.
    # What the engine computed, and what it had, depends on when it was started, too.
    timed = {"rollouts_per_second", "tokens_per_second", "engine/prompt_tokens_computed", "engine/prompt_tokens_reused"}

    def timeless(steps: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
        return {
            step: {k: v for k, v in values.items() if k.replace(".", "/") not in timed and not k.startswith("seconds")}
            for step, values in steps.items()
        }

    if "wandb" in TRACKERS:
        ids, sessions = wandb_sessions(directory)
        assert ids == {result.run_id}
        # A process that is killed may take its last row with it; the second session has that step.
        assert {0, 1, 2} <= set(sessions[0]) <= {0, 1, 2, 3}
        assert timeless(sessions[0]) == timeless({step: history[step] for step in sessions[0]})
        assert sessions[1] == {step: history[step] for step in (3, 4)}
    if "mlflow" in TRACKERS:
        ((run, steps),) = mlflow_runs(trackers, "p")
        assert (run.data.tags["agl.run_id"], run.info.run_name, run.info.status) == (result.run_id, "n", "FINISHED")
        assert run.data.params["seed"] == "0"
        dotted = {step: {k.replace("/", "."): v for k, v in values.items()} for step, values in history.items()}
        assert timeless(steps) == timeless(dotted)
    if "tensorboard" in TRACKERS:
        steps = tensorboard_steps(directory / "tensorboard")
        assert steps == {step: pytest.approx(values, rel=1e-6) for step, values in history.items()}  # float32 there
    if "trackio" in TRACKERS:
        steps = trackio_steps("p", f"n {result.run_id}")
        assert timeless(steps) == timeless(history)
    for name in TRACKERS:
        assert SECRET.encode() in bytes_of(where[name]), f"{name} was asked to keep samples"

    page = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text()
    rows = [line.split("|")[1] for line in page.partition("## Metrics")[2].splitlines() if line.startswith("| `")]
    names = [re.escape(name) for row in rows for name in re.findall(r"`(.+?)`", row)]
    documented = [name.replace("<name>", ".+").replace(re.escape("..."), ".+") for name in names]
    for name in history[4]:
        assert any(re.fullmatch(pattern, name) for pattern in documented), f"docs/tracking.md does not have {name}"
