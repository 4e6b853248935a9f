"""A store's file of a stranger's, or a damaged one: each column of each table holds what agl never writes.

Every command that reads a store shows what it can, or says what is wrong with the file. None ends in a traceback.
"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from changed_json import changed
from programs.small_run import train
from typer.testing import CliRunner

from agl import semconv
from agl.errors import AglError
from agl.trainer.cli.app import app
from agl.trainer.store.sql import schema

VALUES = {
    "other text": "'junk'",
    "no UTF-8": "CAST(x'ff41' AS TEXT)",
    "bytes": "x'ff00'",
    "an empty list": "'[]'",
    "an empty object": "'{}'",
    "a list of lists": "'[[1],{}]'",
    "deep JSON": f"'{'[' * 50_000}'",
    "the largest integer": "9223372036854775807",
    "less than nothing": "-1",
    "infinity": "9e999",
    "half": "0.5",
}
FEW = ("other text", "bytes", "infinity")
"""What `.ci/run` tries of them."""


@pytest.fixture(scope="module")
def trained(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store's file of a run of two steps."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    train(directory, untrained_model)
    return directory / "run.db"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def damaged(file: Path, copy: Path, column: str, value: str) -> bool:
    """Write the value into a column of a copy; False if the table has no rows or its constraints forbid the value."""
    shutil.copy(file, copy)
    table, _, name = column.partition(".")
    with sqlite3.connect(copy) as connection:
        try:
            rows = connection.execute(f"UPDATE OR IGNORE {table} SET {name} = {value}").rowcount
        except sqlite3.IntegrityError:
            rows = 0
    connection.close()
    return rows > 0


def tracebacks(here: Path, column: str, all_words: list[list[str]]) -> list[str]:
    """The commands that a store with a changed column ends by another error than ours. Removes the store afterwards."""
    failures = []
    for words in all_words:
        for left in ("rollouts", "rewards"):
            shutil.rmtree(here / left, ignore_errors=True)
        (here / "sft.jsonl").unlink(missing_ok=True)
        error = CliRunner().invoke(app, words).exception
        if error is not None and not isinstance(error, AglError | SystemExit):
            failures.append(f"{column}: agl {' '.join(words)}: {error!r}")
    for left in here.glob("run.db*"):
        left.unlink()
    return failures


def commands(rollout: str) -> list[list[str]]:
    """Those that read a store, with `run.db` in the working directory."""
    return [
        ["trace", "ls", "--store", "run.db"],
        ["trace", "show", rollout, "--store", "run.db"],
        ["explain", rollout, "--store", "run.db"],
        ["runs", "run.db"],
        ["export", "--store", "run.db", "--out", "rollouts"],
        ["export", "sft", "--store", "run.db", "--out", "sft.jsonl"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", [pytest.param(value, marks=[] if value in FEW else pytest.mark.night) for value in VALUES]
)
def test_every_command_reads_it_or_says_what_is_wrong(trained: Path, here: Path, value: str) -> None:
    with sqlite3.connect(trained) as connection:
        [rollout] = connection.execute("SELECT rollout_id FROM rollouts LIMIT 1").fetchone()
    connection.close()
    failures = []
    tried = 0
    for column in (f"{table.name}.{column.name}" for table in schema.metadata.sorted_tables for column in table.c):
        file = here / "run.db"
        if not damaged(trained, file, column, VALUES[value]):
            continue
        tried += 1
        failures += tracebacks(here, column, commands(rollout))
    assert tried > 60
    assert not failures, "\n".join(failures)


PLANTED: list[Any] = [
    None, True, -1, 2**70, float("nan"), "", "x", "\ud800", "\0", [], {}, ["text"], [["x"]], [None], [{"text": 1}],
    {"type": ["text"]}, {"role": ["x"], "content": {"a": 1}}, "9" * 5000, "[" * 3000,
    {"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg onload=alert(1)>"}},
]  # fmt: skip
JSON_COLUMNS = ("calls.request", "calls.answer", "spans.attributes", "spans.events", "rollouts.metadata", "runs.config")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(1, 10))])
def test_json_of_another_shape_is_shown_or_refused(trained: Path, here: Path, seed: int) -> None:
    """A reward without a value, a message that is a list, an event without attributes: traces of a stranger's."""
    dice = random.Random(seed)
    failures = []
    for column in JSON_COLUMNS * 2:
        table, _, name = column.partition(".")
        file = here / "run.db"
        shutil.copy(trained, file)
        with closing(sqlite3.connect(file)) as connection:
            rows = connection.execute(f"SELECT rowid, {name} FROM {table}").fetchall()
            for row, text in rows:
                other = json.dumps(changed(json.loads(text), dice, PLANTED))
                connection.execute(f"UPDATE {table} SET {name} = ? WHERE rowid = ?", (other, row))
            [rollout] = connection.execute("SELECT rollout_id FROM rollouts LIMIT 1").fetchone()
            connection.commit()
        rewards = ["export", "rewards", "--store", "run.db", "--out", "rewards"]
        failures += tracebacks(here, column, [*commands(rollout), rewards])
    assert not failures, "\n".join(failures)


SHAPES = {
    "messages that are texts": ("calls.request", {"messages": ["hi"]}),
    "tools that are no list": ("calls.request", {"messages": [], "tools": {"name": "t"}}),
    "a tool call that is a text": ("calls.answer", {"tool_calls": ["t"]}),
    "a tool call without a function": ("calls.answer", {"tool_calls": [{"id": "c"}]}),
    "an event that is no event": ("spans.events", [{"name": "e", "time": 1.0, "attributes": ["x"]}]),
    "a reward without a value": (
        "spans.attributes", {semconv.OPERATION_NAME: semconv.REWARD, semconv.REWARD_NAME: "r"},
    ),
    "a reward that is a list": (
        "spans.attributes",
        {semconv.OPERATION_NAME: semconv.REWARD, semconv.REWARD_NAME: "r", semconv.REWARD_VALUE: [1]},
    ),
    "a reward beyond all numbers": (
        "spans.attributes",
        {semconv.OPERATION_NAME: semconv.REWARD, semconv.REWARD_NAME: "r", semconv.REWARD_VALUE: 10**400},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_what_agl_never_writes_is_refused_with_its_name(trained: Path, here: Path, shape: str) -> None:
    column, value = SHAPES[shape]
    table, _, name = column.partition(".")
    shutil.copy(trained, here / "run.db")
    with closing(sqlite3.connect(here / "run.db")) as connection:
        connection.execute(f"UPDATE {table} SET {name} = ?", (json.dumps(value),))
        connection.commit()
    error = CliRunner().invoke(app, ["export", "rewards", "--store", "run.db", "--out", "rewards"]).exception
    assert isinstance(error, AglError), repr(error)
    said = "is a reward, and has no name, or no number" if "reward" in shape else "what agl did not write"
    assert said in str(error)


REPLAYED = ("rollouts", "attempts", "calls", "blobs", "spans")
"""Tables of which `agl replay` reads a rollout's calls."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", [pytest.param(value, marks=[] if value in FEW else pytest.mark.night) for value in VALUES]
)
def test_a_damaged_rollout_is_replayed_or_refused(trained: Path, here: Path, value: str, untrained_model: Path) -> None:
    """The recorded tokens go to a policy: what is none of its tokens must not end in a traceback of torch's."""
    with sqlite3.connect(trained) as connection:
        [rollout] = connection.execute("SELECT rollout_id FROM calls LIMIT 1").fetchone()
    connection.close()
    words = ["replay", rollout, "--model", str(untrained_model), "--store", "run.db", "--max-response-tokens", "2"]
    failures = []
    tried = 0
    for table in schema.metadata.sorted_tables:
        for column in table.c:
            if table.name not in REPLAYED or not damaged(trained, here / "run.db", str(column), VALUES[value]):
                continue
            tried += 1
            error = CliRunner().invoke(app, [*words, "--quiet"]).exception
            if error is not None and not isinstance(error, AglError | SystemExit):
                failures.append(f"{column}: {error!r}")
            for left in here.glob("run.db*"):
                left.unlink()
    assert tried > 20
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("token", [2**31 - 1, -1, 10**6])
def test_tokens_that_the_policy_does_not_have_are_not_replayed(
    trained: Path, here: Path, token: int, untrained_model: Path
) -> None:
    shutil.copy(trained, here / "run.db")
    with sqlite3.connect(here / "run.db") as connection:
        [rollout] = connection.execute("SELECT rollout_id FROM calls LIMIT 1").fetchone()
        columns = [row[1] for row in connection.execute("PRAGMA table_info(calls)") if row[1].endswith("ids")]
        assert columns, "calls have no column of tokens"
        for name in columns:
            rows = connection.execute(f"SELECT rowid, {name} FROM calls").fetchall()
            for row, blob in rows:
                if isinstance(blob, bytes) and len(blob) >= 4:
                    wrong = token.to_bytes(4, "little", signed=True) + blob[4:]
                    connection.execute(f"UPDATE calls SET {name} = ? WHERE rowid = ?", (wrong, row))
    connection.close()
    words = ["replay", rollout, "--model", str(untrained_model), "--store", "run.db", "--max-response-tokens", "2"]
    error = CliRunner().invoke(app, [*words, "--quiet"]).exception
    assert error is None or isinstance(error, AglError | SystemExit), repr(error)
