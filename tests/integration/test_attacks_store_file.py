"""A store's file of a stranger's, or a damaged one: each column of each table holds what agl never writes.

Every command that reads a store shows what it can, or says what is wrong with the file. None ends in a traceback.
"""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from programs.small_run import train
from typer.testing import CliRunner

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
        for words in commands(rollout):
            shutil.rmtree(here / "rollouts", ignore_errors=True)
            (here / "sft.jsonl").unlink(missing_ok=True)
            error = CliRunner().invoke(app, words).exception
            if error is not None and not isinstance(error, AglError | SystemExit):
                failures.append(f"{column}: agl {' '.join(words)}: {error!r}")
        for left in here.glob("run.db*"):
            left.unlink()
    assert tried > 60
    assert not failures, "\n".join(failures)


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
