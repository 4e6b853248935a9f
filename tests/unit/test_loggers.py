"""A tracker that hangs or raises neither slows nor ends a run; what is refused of loggers."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.errors import ConfigError
from agl.trainer.loggers import choose, threads
from agl.trainer.loggers.threads import Loggers
from agl.trainer.report.progress import Progress
from agl.trainer.run.recorder import Recorder
from agl.trainer.run.samples import MAX_TEXT
from agl.trainer.store import open_store
from agl.trainer.store.types import TrainingRun

KEY = "sk-4711"


class Kept:
    """Keeps what it is called with."""

    samples = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, run_id: str, config: Any, resumed_from: int | None) -> None:
        self.calls.append(("start", run_id, config, resumed_from))

    def step(self, step: int, metrics: Any, samples: Any) -> None:
        self.calls.append(("step", step, metrics, samples))

    def end(self, status: str, summary: Any) -> None:
        self.calls.append(("end", status, summary))


class Raises(Kept):
    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()

        def fail(*args: Any) -> None:
            self.calls.append((method, *args))
            raise error

        setattr(self, method, fail)


class Hangs(Kept):
    """Blocks in one method until the test is over."""

    def __init__(self, method: str, release: threading.Event) -> None:
        super().__init__()
        setattr(self, method, lambda *_: release.wait())


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@agl.rollout
async def agent(task: dict[str, str]) -> float:
    return 0.5


def measure(directory: Path, *log: Any, **options: Any) -> agl.Result:
    trainer = agl.Trainer(agl.Baseline(), directory=directory, progress=False, log=log, **options)
    return trainer.fit(agent, [{"question": "q"}])


class Noted(Progress):
    """Keeps the notes."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


async def recorded(directory: Path, steps: int, *log: Any) -> Noted:
    """Record a run of so many steps."""
    store = await open_store(f"sqlite:///{directory / 'run.db'}")
    notes = Noted()
    recorder = Recorder(store, notes, TrainingRun("run-1"), loggers=Loggers(log))
    await recorder.begin("run-1", steps)
    for step in range(1, steps + 1):
        await recorder.add({"step": step, "train/reward": step / 10, "loss": math.nan})
    await recorder.end("succeeded")
    await store.close()
    return notes


def test_a_logger_gets_what_the_history_has(tmp_path: Path) -> None:
    kept = Kept()
    options = {"initial_resources": {"prompt": "a secret text"}, "runner_key": KEY}
    result = measure(tmp_path, kept, name="mine", **options)
    (_, run_id, config, resumed_from), step, end = kept.calls
    (entry,) = result.history
    numbers = {name: value for name, value in entry.items() if name != "step"}
    assert (run_id, resumed_from) == (result.run_id, None)
    assert (config["seed"], config["initial_resources"]) == (0, ["prompt"])
    assert "secret" not in str(config)
    assert KEY not in str(config)
    assert step == ("step", entry["step"], numbers, [])
    assert end == ("end", "succeeded", numbers)


@pytest.mark.parametrize("method", ["start", "step", "end"])
def test_a_logger_that_raises_is_noted_once_and_not_called_again(method: str, tmp_path: Path) -> None:
    kept = Kept()
    for error in (ValueError("down"), SystemExit("down")):
        directory = tmp_path / type(error).__name__
        directory.mkdir()
        bad = Raises(method, error)
        notes = asyncio.run(recorded(directory, 3, bad, kept)).notes
        expected = f"the logger Raises failed and is not called again: {type(error).__name__}: down"
        assert notes == [expected]
        assert [call[0] for call in bad.calls].count(method) == 1
        assert bad.calls[-1][0] == method
    assert len(kept.calls) == 2 * 5


@pytest.mark.parametrize("method", ["start", "step", "end"])
def test_a_logger_that_hangs_holds_up_nothing(
    method: str, tmp_path: Path, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.2)
    kept = Kept()
    notes = asyncio.run(recorded(tmp_path, 3, Hangs(method, release), kept)).notes
    left = {"start": 3, "step": 2, "end": 0}[method]
    assert notes == [f"the logger Hangs did not end: {left} steps were not logged"]
    assert [call[1] for call in kept.calls if call[0] == "step"] == [1, 2, 3]
    assert kept.calls[1][2] == {"train/reward": 0.1}, "what is not finite is left out"


def test_of_too_many_steps_the_oldest_are_dropped(
    tmp_path: Path, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "MAX_WAITING", 2)
    slow = Kept()
    start = slow.start
    slow.start = lambda *args: (release.wait(), start(*args))  # type: ignore[method-assign, assignment, return-value]
    kept = Kept()

    async def run() -> Noted:
        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        notes = Noted()
        recorder = Recorder(store, notes, TrainingRun("run-1"), loggers=Loggers([slow, kept]))
        await recorder.begin("run-1", 5)
        for step in range(1, 6):
            await recorder.add({"step": step, "x": 1.0})
            while sum(call[0] == "step" for call in kept.calls) < step:
                await asyncio.sleep(0.001)
        release.set()
        await recorder.end("succeeded")
        await store.close()
        return notes

    notes = asyncio.run(run()).notes
    assert [call[1] for call in slow.calls if call[0] == "step"] == [4, 5]
    assert [call[1] for call in kept.calls if call[0] == "step"] == [1, 2, 3, 4, 5]
    assert len(notes) == 2
    assert "the logger Kept is slower than the run" in notes[0]
    assert notes[1] == "the logger Kept did not get 3 steps"


def test_texts_go_to_loggers_that_ask_for_them_and_are_cut(tmp_path: Path) -> None:
    kept, asks = Kept(), Kept()
    asks.samples = 2
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False, log=[kept, asks])
    trainer.fit(agent, [{"question": "short"}, {"question": "long " * MAX_TEXT}, {"question": "third"}])
    assert kept.calls[1][3] == []
    first, second = asks.calls[1][3]
    assert (first.task, first.reward, first.rewards, first.mode) == (
        '{"question": "short"}',
        0.5,
        {"reward": 0.5},
        "dev",
    )
    assert MAX_TEXT < len(second.task) < MAX_TEXT + 100
    assert second.task.endswith("characters left out)")


def test_what_is_no_logger_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def trainer(log: Any) -> agl.Trainer:
        return agl.Trainer(agl.Baseline(), log=log)

    with pytest.raises(ConfigError, match="names 'tensorbord'") as caught:
        trainer(["tensorbord"])
    assert "did you mean 'tensorboard'?" in str(caught.value)
    for wrong in (3, [print], [Kept], {"wandb": 1}.keys() | {object()}):
        with pytest.raises(ConfigError):
            trainer(wrong)
    with pytest.raises(ConfigError, match="'tensorboard' twice"):
        trainer(["tensorboard", agl.loggers.TensorBoard(samples=1)])
    greedy = Kept()
    greedy.samples = 1000
    with pytest.raises(ConfigError, match="samples=1000"):
        trainer(greedy)
    with pytest.raises(ConfigError, match="samples=-1"):
        agl.loggers.TensorBoard(samples=-1)
    monkeypatch.setattr(agl.loggers.TensorBoard, "module", "no_such_package")
    with pytest.raises(ConfigError, match="'tensorboard' needs the package tensorboardX") as caught:
        trainer("tensorboard")
    assert "pip install tensorboardX" in str(caught.value)


def test_wandb_without_a_login_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="not logged in"):
        agl.loggers.WandB(mode="online")
    assert agl.loggers.WandB(mode="offline").mode == "offline"


def test_the_trackers_of_a_verl_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def loggers(value: Any, log: Any = None, **more: Any) -> tuple[agl.Trainer, Any]:
        algorithm = agl.VERL({"trainer.logger": value, **more}, backend="local", model="m", steps=1, group_size=2)
        return agl.Trainer(algorithm, log=log), algorithm.plan.settings["trainer.logger"]

    trainer, left = loggers(["console", "tensorboard"], **{"trainer.project_name": "p", "trainer.experiment_name": "n"})
    assert ([choose.name_of(logger) for logger in trainer.loggers], left) == (["tensorboard"], ["console"])
    assert (trainer.project, trainer.name) == ("p", "n")
    trainer, left = loggers("tensorboard", ["tensorboard"], **{"trainer.log_val_generations": 3})
    assert ([(choose.name_of(x), choose.samples_of(x)) for x in trainer.loggers], left) == ([("tensorboard", 0)], [])
    trainer, left = loggers("tensorboard", **{"trainer.log_val_generations": 3})
    assert [choose.samples_of(x) for x in trainer.loggers] == [3]
    trainer, left = loggers(["console"])
    assert (trainer.loggers, left) == ((), ["console"])
    with pytest.raises(ConfigError, match=r"trainer\.logger names 'tensorbord'"):
        loggers(["tensorbord"])


def test_the_logger_in_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if block.startswith("class Lines")]
    names: dict[str, Any] = {"json": json}
    exec(code, names)
    monkeypatch.chdir(tmp_path)
    result = measure(tmp_path / "run", names["Lines"]())
    (line,) = (tmp_path / f"{result.run_id}.jsonl").read_text().splitlines()
    assert json.loads(line) == result.history[0]
