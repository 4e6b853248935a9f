"""Commands that train while the clock is set by hours: no duration in a store, a metric, an export or a line that is
printed is negative, or longer than what has passed.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from clock_shift import HOUR, ShiftedClock
from processes import AGL, Programs, free_port, programs
from receiver import receiving

from agl.trainer.quickstart.run import SEED_FILE

pytestmark = [pytest.mark.slow, pytest.mark.night]
SECONDS = 300.0
ASKING = """
import agl

@agl.rollout
def agent(task, llm: agl.LLM):
    import openai

    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    asked = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task["question"]}])
    return float(len(asked.choices[0].message.content or "") % 2)
"""
OWN = ("--model", "policy", "--tasks", "tasks.jsonl", "--batch-size", 2, "--max-response-tokens", 6, "--device", "cpu")
STEPS = 6


@pytest.fixture
def at(tmp_path: Path, untrained_model: Path) -> Iterator[Programs]:
    (tmp_path / "asking.py").write_text(ASKING)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "{i}"}}\n' for i in range(4)))
    shutil.copytree(untrained_model, tmp_path / "policy")
    with programs(tmp_path, XDG_STATE_HOME=str(tmp_path / "state")) as started:
        yield started


def train(at: Programs) -> tuple[Any, Path]:
    words = ("--agent", "asking.py:agent", "--group-size", 2, "--steps", STEPS, "--directory", "out")
    return at.start(*AGL, "train", *OWN, *words, log="command.log"), at.directory / "out"


def runner(at: Programs) -> tuple[Any, Path]:
    """`agl train --runners remote`, and `agl runner`, whose clock is set with it."""
    port = free_port()
    words = ("--group-size", 2, "--steps", STEPS, "--directory", "out", "--runners", "remote", "--port", port)
    training = at.start(*AGL, "train", *OWN, *words, log="command.log")
    url = f"http://127.0.0.1:{port}"
    at.start(*AGL, "runner", "--store", url, "--agent", "asking.py:agent", "--n-workers", 2, log="runner.log")
    return training, at.directory / "out"


def sweep(at: Programs) -> tuple[Any, Path]:
    words = ("--over", "group_size=2", "--seeds", 1, "--directory", "all", "--", *OWN)
    own = ("--agent", "asking.py:agent", "--steps", STEPS)
    return at.start(*AGL, "sweep", *words, *own, log="command.log"), at.directory / "all" / "group_size=2_seed=0"


def quickstart(at: Programs) -> tuple[Any, Path]:
    (at.directory / "qs").mkdir()
    shutil.copytree(at.directory / "policy", at.directory / "qs" / "start-policy")
    (at.directory / "qs" / "start-policy" / SEED_FILE).write_text("0\n")
    words = ("--directory", "qs", "--steps", STEPS)
    return at.start(*AGL, "quickstart", *words, log="command.log"), at.directory / "qs"


COMMANDS: dict[str, Callable[[Programs], tuple[Any, Path]]] = {
    "train": train, "runner": runner, "sweep": sweep, "quickstart": quickstart,
}  # fmt: skip


@pytest.mark.parametrize("hours", [51, -48], ids=["ahead", "back"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_duration_is_one_that_the_clock_made(command: str, hours: int, at: Programs, tmp_path: Path) -> None:
    clock, began = ShiftedClock(tmp_path), time.monotonic()
    at.environment |= clock.environment
    process, place = COMMANDS[command](at)
    at.until(lambda: process.poll() is not None or [*place.glob("checkpoints/step-000002*")], SECONDS, "two steps")
    assert process.poll() is None, at.text("command.log")
    clock.set(hours * HOUR)
    assert process.wait(SECONDS) == 0, at.text("command.log")[-4000:]
    clock.set(0)
    with receiving() as receiver:
        exported = (*AGL, "trace", "export", "--all", "--otlp", receiver.url, "--store", place)
        assert at.start(*exported, log="otlp.log").wait(SECONDS) == 0, at.text("otlp.log")
        spans = receiver.spans
    assert at.start(*AGL, "runs", place, log="runs.log").wait(SECONDS) == 0, at.text("runs.log")
    assert at.start(*AGL, "trace", "ls", "--store", place, log="ls.log").wait(SECONDS) == 0, at.text("ls.log")
    passed = time.monotonic() - began
    found = {
        **in_store(place / "run.db"),
        "OTLP": [(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in spans],
        **{log: printed(at.text(log)) for log in ("command.log", "runs.log", "ls.log")},
    }
    for where, durations in found.items():
        assert all(0 <= each <= passed for each in durations), (where, durations, passed)
    for where in ("calls", "spans", "rollouts", "attempts", "runs", "metrics", "OTLP"):
        assert found[where], where


def in_store(path: Path) -> dict[str, list[float]]:
    """All durations of a store, in seconds."""
    ends = {"calls": "started_at", "spans": "started_at", "attempts": "started_at", "rollouts": "created_at"}
    with closing(sqlite3.connect(path)) as connection:
        found = {
            table: [took for (took,) in connection.execute(f"SELECT ended_at - {start} FROM {table}")]
            for table, start in ends.items()
        }
        query = "SELECT ended_at - created_at FROM runs"
        found["runs"] = [took for (took,) in connection.execute(query)]
        query = "SELECT value FROM metrics WHERE name LIKE '%seconds%' AND value IS NOT NULL"
        found["metrics"] = [took for (took,) in connection.execute(query)]
    return found


def printed(text: str) -> list[float]:
    """The durations in what a command printed, in seconds."""
    units = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
    return [float(number) * units[unit] for number, unit in re.findall(r"(-?[0-9.]+) (ms|s|min|h)\b", text)]
