"""`agl store prune`: the command, what it says, and that a file is smaller after it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from postgres import Server
from typer.testing import CliRunner

from agl.mdp.spans import Span
from agl.trainer.cli.app import app
from agl.trainer.store import open_store
from agl.trainer.store.types import NewRollout


def fill(url: str) -> None:
    async def work() -> None:
        store = await open_store(url)
        await store.enqueue_rollouts([NewRollout(n, rollout_id=f"r{n}", run_id=f"run{n % 2}") for n in range(4)])
        for n in range(4):
            await store.dequeue_rollout()
            spans = [
                Span("1" * 32, f"{n}-{k}", None, f"r{n}", 1, "chat", 0.0, 1.0, attributes={"x": "y" * 50_000})
                for k in range(10)
            ]
            await store.add_spans(spans)
            await store.update_attempt(f"r{n}", 1, "succeeded")
        await store.close()

    asyncio.run(work())


def test_old_rollouts_are_pruned_and_the_file_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    fill(str(path))
    before = path.stat().st_size
    command = ["store", "prune", "--store", str(path), "--json", str(tmp_path / "facts.json"), "--older-than"]
    done = CliRunner().invoke(app, [*command, "30d"])
    assert "deleted 0 attempts, 0 calls and 0 spans of 0 rollouts" in done.output
    done = CliRunner().invoke(app, [*command, "0s", "--run", "run1"])
    assert json.loads((tmp_path / "facts.json").read_text()) == {"rollouts": 2, "attempts": 2, "calls": 0, "spans": 20}
    assert path.stat().st_size < 0.7 * before
    done = CliRunner().invoke(app, [*command, "a while"])
    assert done.exit_code == 2
    assert "'a while' is not a duration" in done.output


def test_a_server_is_pruned_by_its_url(postgres: Server) -> None:
    url = postgres.new_database()
    fill(url)
    done = CliRunner().invoke(app, ["store", "prune", "--older-than", "0s", "--store", url])
    assert "deleted 4 attempts, 0 calls and 40 spans of 4 rollouts" in done.output
    assert postgres.sql("SELECT count(*) FROM spans", url) == [(0,)]
    ((vacuumed,),) = postgres.sql("SELECT vacuum_count FROM pg_stat_user_tables WHERE relname = 'spans'", url)
    assert vacuumed == 1
    listed = CliRunner().invoke(app, ["explain", "--list", "--store", url])
    assert "r0" in listed.output


def test_the_command_says_what_it_can_do() -> None:
    assert "prune" in CliRunner().invoke(app, ["store", "--help"]).output
