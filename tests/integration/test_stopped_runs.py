"""SIGTERM and SIGHUP are Ctrl-C: what was trained is saved, wherever they come and however many, and the run that
resumes equals one that was never stopped. Shown with `timeout -s TERM`, which signals a whole process group."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import AGL, Programs, fetch, free_port, programs
from running import gone, say
from safetensors.torch import load_file
from tiny_run import TRAIN, VAL

import agl

SMALL: dict[str, Any] = {
    "group_size": 2, "batch_size": 2, "learning_rate": 1e-3, "max_response_tokens": 6, "max_context": 128,
    "checkpoint_every": 100, "device": "cpu",
}  # fmt: skip
SECONDS = 90


class Interrupt(agl.Callback):
    """Sends this process a signal, twice, at a place of the step after the second.

    Args:
        place: "sampling", "update", "validation" or "" for never. directory: for marks between processes.
    """

    def __init__(self, place: str, number: signal.Signals, directory: Path) -> None:
        self.place, self.number, self.directory = place, number, directory
        self.armed = False

    def on_step(self, run: Any, entry: Any) -> None:
        if entry["step"] == 2 and self.place:
            self.armed = True
            if self.place == "update":
                (self.directory / "armed").touch()
                threading.Thread(target=self._when_updating, daemon=True).start()

    def at(self, place: str) -> None:
        if self.armed and place == self.place:
            self.armed = False
            for _ in range(2):
                os.kill(os.getpid(), self.number)
                # Long enough to be two signals, and short enough for both to come while the run ends.
                time.sleep(0.01)

    def _when_updating(self) -> None:
        while not (self.directory / "updating").exists():
            time.sleep(0.01)
        self.at("update")


def fit(
    model: Path, directory: Path, interrupt: Interrupt, *, resume: bool = False, max_staleness: int = 0
) -> agl.Result:
    """Train; with `max_staleness` above 0 the rollouts of the next step take longer than the update that has a mark."""
    marks = str(interrupt.directory)

    def clipped(logprobs: Any, old: Any, advantages: Any, answers: Any) -> Any:
        """In the policy's process; an update that takes a second, if there is a mark."""
        if os.path.exists(f"{marks}/armed"):
            os.rename(f"{marks}/armed", f"{marks}/updating")
            time.sleep(1)
        ratio = (logprobs - old).exp()
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))

    @agl.rollout
    def agent(task: dict[str, str], llm: agl.LLM) -> float:
        interrupt.at("validation" if task in VAL else "sampling")
        if max_staleness and os.path.exists(f"{marks}/updating"):
            time.sleep(0.6)
        return len(say(llm, task["question"])) % 5 / 4

    algorithm = agl.GRPO(
        model=str(model), policy_loss=clipped, steps=4, val_every=1, max_staleness=max_staleness, **SMALL
    )
    trainer = agl.Trainer(algorithm, n_workers=1, directory=directory, callbacks=interrupt)
    return trainer.fit(agent, TRAIN, VAL, resume=resume)


def same_every_time(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("step", "train/reward", "val/reward", "train/rollouts", "train/tokens", "learner/loss", "policy_version")
    return [{name: entry[name] for name in names if name in entry} for entry in history]


@pytest.mark.parametrize(
    ("place", "number", "saved"),
    [
        ("sampling", signal.SIGTERM, 2),
        ("update", signal.SIGTERM, 3),
        ("validation", signal.SIGHUP, 3),
        ("update", signal.SIGINT, 3),
    ],
)
def test_a_run_that_is_stopped_anywhere_equals_one_never_stopped(
    untrained_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: str,
    number: signal.Signals,
    saved: int,
) -> None:
    never = Interrupt("", number, tmp_path)
    whole = fit(untrained_model, tmp_path / "whole", never)
    capsys.readouterr()
    directory = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt, match=number.name):
        fit(untrained_model, directory, Interrupt(place, number, tmp_path))
    assert [path.name for path in (directory / "checkpoints").iterdir()] == [f"step-{saved:06d}"]
    assert "Resume it with resume=True / --resume" in " ".join(capsys.readouterr().err.split())
    with sqlite3.connect(directory / "run.db") as database:
        assert database.execute("SELECT status FROM runs").fetchall() == [("stopped",)]
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)

    resumed = fit(untrained_model, directory, never, resume=True)
    assert same_every_time(resumed.history) == same_every_time(whole.history)
    assert whole.policy is not None
    assert resumed.policy is not None
    expected, got = (load_file(result.policy / "model.safetensors") for result in (whole, resumed) if result.policy)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_rollouts_that_run_ahead_end_under_the_weights_that_began_them(untrained_model: Path, tmp_path: Path) -> None:
    never = Interrupt("", signal.SIGTERM, tmp_path)
    whole = fit(untrained_model, tmp_path / "whole", never, max_staleness=1)
    directory = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        fit(untrained_model, directory, Interrupt("update", signal.SIGTERM, tmp_path), max_staleness=1)
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-000003"]
    resumed = fit(untrained_model, directory, never, resume=True, max_staleness=1)
    assert same_every_time(resumed.history) == same_every_time(whole.history)


class StopsBeforeUpdate(agl.GRPO):
    """Is stopped once between sampling the third step and its update."""

    async def rows(self, training: Any, worth: Any, step: int) -> Any:
        mark = training.run.directory / "stopped"
        if step == 2 and training.run.directory.name == "stopped" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(SECONDS)
        return await agl.GRPO.rows(self, training, worth, step)


def test_tasks_drawn_by_their_spread_are_the_same_after_a_stop(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        return len(say(llm, task)) % 5 / 4

    def fit(directory: Path, *, resume: bool = False) -> agl.Result:
        algorithm = StopsBeforeUpdate(model=str(untrained_model), steps=5, task_sampling="learnability", **SMALL)
        trainer = agl.Trainer(algorithm, n_workers=1, directory=directory)
        return trainer.fit(agent, [f"task {i}" for i in range(8)], resume=resume)

    def steps(directory: Path) -> list[Any]:
        with sqlite3.connect(directory / "run.db") as database:
            statement = "SELECT DISTINCT step, task FROM rollouts WHERE status = 'succeeded' ORDER BY step, task"
            return database.execute(statement).fetchall()

    whole = fit(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        fit(tmp_path / "stopped")
    resumed = fit(tmp_path / "stopped", resume=True)
    assert same_every_time(resumed.history) == same_every_time(whole.history)
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole")


def test_a_run_that_fails_saves_the_steps_before(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def agent(task: dict[str, str], llm: agl.LLM) -> float:
        if (tmp_path / "broken").exists():
            raise ValueError("the reward's data is gone")
        return len(say(llm, task["question"])) % 5 / 4

    class Break(agl.Callback):
        def on_step(self, run: Any, entry: Any) -> None:
            if entry["step"] == 3:
                (tmp_path / "broken").touch()

    algorithm = agl.GRPO(model=str(untrained_model), steps=5, **SMALL)
    trainer = agl.Trainer(algorithm, n_workers=2, directory=tmp_path / "run", callbacks=Break(), progress=False)
    with pytest.raises(agl.errors.AglError, match="data is gone"):
        trainer.fit(agent, TRAIN)
    assert json.loads((tmp_path / "run/checkpoints/step-000003/run.json").read_text())["step"] == 3
    (tmp_path / "broken").unlink()
    assert [h["step"] for h in trainer.fit(agent, TRAIN, resume=True).history] == [1, 2, 3, 4, 5]


# -- programs ---------------------------------------------------------------------------------------------------------

MINE = """
import agl
from openai import OpenAI

@agl.rollout
def agent(task, llm: agl.LLM) -> float:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages = [{"role": "user", "content": task["question"]}]
    answer = client.chat.completions.create(model=llm.model, messages=messages)
    return len(answer.choices[0].message.content or "") % 5 / 4
"""
SCRIPT = """
import sys
import agl
from mine import agent

algorithm = agl.GRPO(model=sys.argv[1], steps=100_000, {settings})
agl.Trainer(algorithm, n_workers=2, directory="out").fit(agent, TASKS, resume="--resume" in sys.argv)
"""
FLAGS = tuple(
    word
    for setting in (*(f"{name}={value}" for name, value in SMALL.items()), "steps=100000", "n_workers=2")
    for word in ("--set", setting)
)
UNDER_TIMEOUT = ("timeout", "-s", "TERM", 3600)


@pytest.fixture
def at(tmp_path: Path) -> Any:
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, TRAIN)))
    (tmp_path / "mine.py").write_text(MINE)
    settings = ", ".join(f"{name}={value!r}" for name, value in SMALL.items())
    (tmp_path / "script.py").write_text(f"TASKS = {TRAIN!r}\n" + SCRIPT.format(settings=settings))
    with programs(tmp_path) as started:
        yield started


def step_of(database: Path) -> int:
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return connection.execute("SELECT max(step) FROM runs").fetchone()[0] or 0
    except sqlite3.OperationalError:  # it is being made
        return 0


def ended_by_timeout(at: Programs, program: Any) -> int:
    """As when its time is up: `timeout` passes the signal on to the program and its whole process group."""
    children = [int(pid) for pid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()]
    os.kill(program.pid, signal.SIGTERM)
    at.until(lambda: program.poll() is not None, SECONDS, "the end")
    assert all(gone(pid) for pid in children)
    return program.returncode


def saved_step(directory: Path) -> int:
    steps = sorted((directory / "checkpoints").glob("step-*/run.json"))
    return json.loads(steps[-1].read_text())["step"] if steps else 0


EXITING = """
import asyncio, os, signal, threading
import torch._dynamo
from agl.trainer.http.aio import run_in_thread

threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
run_in_thread(asyncio.sleep(600))
"""


TABULATE = """
from collections import namedtuple

Row = namedtuple("Row", "cells")


def tabulate(rows, headers):
    return ""
"""


def test_what_torch_imports_as_a_program_exits_leaves_its_exit_status(at: Programs, tmp_path: Path) -> None:
    # As the real one does by way of wcwidth: a named tuple is compiled from a string.
    (tmp_path / "tabulate.py").write_text(TABULATE)
    (tmp_path / "exiting.py").write_text(EXITING)
    program = at.start(sys.executable, "exiting.py", log="exiting.log")
    at.until(lambda: program.poll() is not None, SECONDS, "the end")
    assert program.returncode in (-signal.SIGINT, 128 + signal.SIGINT), at.text("exiting.log")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "script"])
def test_timeout_ends_a_training_with_its_steps_saved(
    at: Programs, untrained_model: Path, tmp_path: Path, kind: str
) -> None:
    script = (sys.executable, "script.py", untrained_model)
    train = (*AGL, "train", "--model", untrained_model, "--tasks", "tasks.jsonl", "--agent", "mine.py:agent",
             "--directory", "out", *FLAGS)  # fmt: skip
    words = script if kind == "script" else train
    program = at.start(*UNDER_TIMEOUT, *words, log="first.log")
    at.until(lambda: step_of(tmp_path / "out" / "run.db") >= 3, SECONDS, "three steps")
    status = ended_by_timeout(at, program)
    # A script that does not catch it ends as Python does on Ctrl-C.
    assert status in ((128 + signal.SIGINT,) if kind == "train" else (-signal.SIGINT, 128 + signal.SIGINT))
    saved = saved_step(tmp_path / "out")
    assert saved >= 3
    assert "Resume it with" in " ".join(at.text("first.log").split())
    if kind == "train":
        assert "Traceback" not in at.text("first.log")

    again = at.start(*UNDER_TIMEOUT, *words, "--resume", log="second.log")
    at.until(lambda: step_of(tmp_path / "out" / "run.db") >= saved + 1, SECONDS, "a step of the resumed run")
    ended_by_timeout(at, again)
    assert saved_step(tmp_path / "out") > saved


@pytest.mark.slow
def test_timeout_ends_a_server_and_its_runner(at: Programs, untrained_model: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ("--model", untrained_model, "--algorithm", "grpo", "--data", "tasks.jsonl", "--start", "--port", port,
               "--directory", "out")  # fmt: skip
    server = at.start(*UNDER_TIMEOUT, *AGL, "serve", *options, *FLAGS, log="server.log")
    at.until(lambda: fetch(f"{url}/health")[0] == 200, SECONDS, "the server")
    runner = at.start(
        *UNDER_TIMEOUT, *AGL, "runner", "--store", url, "--agent", "mine.py:agent", "--n-workers", 2,
        "--json", "runner.json", log="runner.log",
    )  # fmt: skip
    at.until(lambda: fetch(f"{url}/runs/latest")[1]["step"] >= 2, SECONDS, "two steps")
    assert ended_by_timeout(at, runner) == 0
    facts = json.loads((tmp_path / "runner.json").read_text())
    assert facts["attempts"]["succeeded"] >= 8
    step = fetch(f"{url}/runs/latest")[1]["step"]
    assert ended_by_timeout(at, server) == 0
    (run,) = (tmp_path / "out" / "runs").iterdir()
    assert saved_step(run) >= step
    assert "start it again with the same --directory to resume its run" in " ".join(at.text("server.log").split())
