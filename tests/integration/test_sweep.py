"""`agl sweep`: every combination for every seed, once; a failed run is said, and the table is what the runs came to."""

from __future__ import annotations

import json
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

AGL = [sys.executable, "-c", "from agl.trainer.cli import main; main()"]
AGENT = """
import openai

def agent(task):
    client = openai.OpenAI(api_key="unused")
    asked = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
    return asked.choices[0].message.content or ""

def reward(task, output):
    return len(output) % 7 / 7
"""


def sweep(cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*AGL, "sweep", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=500, check=False
    )


def workspace(tmp_path: Path, model: Path) -> list[object]:
    (tmp_path / "mine.py").write_text(AGENT)
    for name in ("tasks", "val"):
        lines = (json.dumps({"question": f"{name} {i}"}) for i in range(4))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = ["--tasks", "tasks.jsonl", "--val", "val.jsonl", "--agent", "mine.py:agent", "--reward", "mine.py:reward"]
    return ["--model", model, *files, "--steps", 1, "--batch-size", 2, "--max-response-tokens", 8, "--quiet"]


@pytest.mark.slow
@pytest.mark.night
def test_each_combination_is_trained_for_each_seed_and_once(untrained_model: Path, tmp_path: Path) -> None:
    train = workspace(tmp_path, untrained_model)
    command = ("--over", "learning_rate=1e-5,1e-3", "--over", "group-size=2", "--seeds", 2, "--directory", "all")
    done = sweep(tmp_path, *command, "--json", "rows.json", "--", *train)
    assert done.returncode == 0, done.stderr
    assert "run 2 of 4: learning_rate=1e-5, group_size=2, seed=1" in done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["settings"] for row in rows] == [
        {"learning_rate": rate, "group_size": "2"} for rate in ("1e-5", "1e-3")
    ]
    for row in rows:
        histories = [json.loads((tmp_path / d / "result.json").read_text())["history"] for d in row["directories"]]
        assert row["rewards"] == [h[-1]["val/reward"] for h in histories]
        assert row["mean"] == pytest.approx(statistics.mean(row["rewards"]))
        # Student's quantile for two runs is 12.706.
        half = 12.706 * statistics.stdev(row["rewards"]) / 2**0.5
        assert (row["low"], row["high"]) == pytest.approx((row["mean"] - half, row["mean"] + half), rel=1e-3, abs=1e-6)
        assert f"{row['mean']:.3f}" in done.stdout
    configs = {json.loads((tmp_path / d / "result.json").read_text())["run_id"] for r in rows for d in r["directories"]}
    assert len(configs) == 4
    again = sweep(tmp_path, *command, "--json", "-", "--", *train)
    assert again.stderr.count("(is there)") == 4
    kept = [json.loads(line) for line in again.stdout.splitlines()]
    assert kept == rows


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--over", "learning_rate", "--", "--model", "m"], "name a setting and its values"),
        (["--over", "lr=1,1", "--", "--model", "m"], "is there twice"),
        (["--over", "lr=1", "--over", "lr=2", "--", "--model", "m"], "is there twice"),
        (["--over", "seed=1,2", "--", "--model", "m"], "--seeds N repeats"),
        (["--over", "lr=1", "--", "--seed", "1"], "--seed for agl train"),
        (["--over", "learning_rat=1e-5,1e-4", "--", "--model", "m", "--tasks", "tasks.jsonl"], "the first run failed"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_trained(
    arguments: list[str], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "x"}\n')
    done = sweep(tmp_path, *arguments)
    assert done.returncode == 1
    assert reason in " ".join(done.stderr.split())
    if "learning_rat=" in arguments[1]:
        assert "learning_rate" in done.stderr, "agl train's own error names what was meant"
        assert done.stderr.count("run 1 of 6") == 1


def test_a_run_that_fails_is_counted_and_shown_last(tmp_path: Path) -> None:
    """Of three combinations the second one fails at once: its learning rate is no number."""
    (tmp_path / "tasks.jsonl").write_text('{"question": "x"}\n')
    for value, reward in (("1e-5", 0.25), ("1e-4", 0.75)):
        kept = tmp_path / "all" / f"learning_rate={value}_seed=0"
        kept.mkdir(parents=True)
        facts = {"measure": "val/reward", "reward": reward, "low": reward - 0.1, "high": reward + 0.1, "minutes": 2.0}
        facts["arguments"] = ["--model", "m", "--tasks", "tasks.jsonl"]
        (kept / "facts.json").write_text(json.dumps(facts))
    command = ("--over", "learning_rate=1e-5,fast,1e-4", "--seeds", 1, "--directory", "all")
    done = sweep(tmp_path, *command, "--", "--model", "m", "--tasks", "tasks.jsonl")
    assert done.returncode == 1
    assert "1 runs failed; the same line tries them again" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1e-4", "1e-5", "fast"]
    assert rows[0][1:] == ["1", "0.750", "0.650", "to", "0.850", "2.0"]
    assert rows[2][1:] == ["0", "-", "-", "-"]
    other = sweep(tmp_path, *command, "--", "--model", "another", "--tasks", "tasks.jsonl")
    assert other.returncode == 1
    assert "a run with other options of agl train is there" in other.stderr
    assert "run 1 of" not in other.stderr


@pytest.mark.slow
@pytest.mark.night
def test_ctrl_c_saves_the_run_and_the_same_line_goes_on(untrained_model: Path, tmp_path: Path) -> None:
    train = [30 if part == 1 else part for part in workspace(tmp_path, untrained_model)]
    command = ["--over", "group_size=2", "--seeds", 1, "--directory", "all", "--json", "rows.json", "--", *train]
    place = tmp_path / "all" / "group_size=2_seed=0"
    with subprocess.Popen(
        [*AGL, "sweep", *map(str, command)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        until = time.monotonic() + 200
        while not [*place.glob("checkpoints/*")]:
            assert running.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=200)
    assert running.returncode == 130
    assert "Traceback" not in said
    assert not (place / "facts.json").exists()
    with sqlite3.connect(place / "run.db") as store:
        assert store.execute("SELECT status FROM runs").fetchone() == ("stopped",), "it ended itself"
    again = sweep(tmp_path, *command)
    assert again.returncode == 0, again.stderr
    steps = [e["step"] for e in json.loads((place / "result.json").read_text())["history"] if "train/reward" in e]
    assert steps == [*range(1, 31)]
    with sqlite3.connect(place / "run.db") as store:
        assert store.execute("SELECT count(*) FROM runs").fetchone() == (1,), "resumed, and not begun again"
