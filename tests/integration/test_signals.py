"""The table of docs/runners.md, "How commands end": each command gets each signal, and a second one while it ends."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sqlite3
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import AGL, Programs, family, fetch, free_port, programs
from running import gone

from agl.trainer.http import local_key
from agl.trainer.quickstart.run import SEED_FILE
from agl.trainer.store import open_store
from agl.trainer.store.types import NewRollout

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS = 300.0
MINE = """
import asyncio
import agl

@agl.rollout
async def agent(task):
    await asyncio.sleep(0.2 if isinstance(task, int) else 600)
    return 1.0

@agl.rollout
def asking(task, llm: agl.LLM):
    import openai

    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    asked = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task["question"]}])
    return float(len(asked.choices[0].message.content or "") % 2)
"""


@dataclass
class Case:
    """A command that runs. `process`: it. `check`: what must hold once it has ended. `status`: its exit status."""

    process: Any
    check: Callable[[], None]
    status: tuple[int, ...] = (0,)


def served(at: Programs, command: str, *words: object) -> tuple[Any, int]:
    """A server that answers."""
    port = free_port()
    process = at.start(*AGL, command, *words, "--port", port, log=f"{command}.log")
    at.until(lambda: fetch(f"http://127.0.0.1:{port}/health")[0] == 200, SECONDS, command)
    return process, port


def key_file(at: Programs, port: int) -> Path:
    return Path(at.environment["XDG_STATE_HOME"]) / "agl" / "keys" / f"127.0.0.1-{port}"


def store(at: Programs) -> Case:
    process, port = served(at, "store", "--db", at.directory / "s.db")
    assert key_file(at, port).exists()

    def check() -> None:
        assert not key_file(at, port).exists(), "its key is still there"
        assert not (at.directory / "s.db-wal").exists(), "the database was not closed"

    return Case(process, check)


def dashboard(at: Programs) -> Case:
    at.environment["AGL_STORE"] = str(at.directory / "d.db")
    asyncio.run(made(at.directory / "d.db"))
    port = free_port()
    process = at.start(*AGL, "dashboard", at.directory / "d.db", "--port", port, log="dashboard.log")
    at.until(lambda: "open " in at.text("dashboard.log"), SECONDS, "the dashboard")
    return Case(process, lambda: None)


async def made(path: Path) -> None:
    await (await open_store(str(path))).close()


def runner(at: Programs) -> Case:
    """It is in the middle of an attempt, which somebody else takes up at once."""
    _, port = served(at, "store", "--db", at.directory / "s.db")
    asyncio.run(enqueued(f"http://:{key_file(at, port).read_text()}@127.0.0.1:{port}"))
    url, key = f"http://127.0.0.1:{port}", at.directory / "key"
    key.write_text(key_file(at, port).read_text())
    process = at.start(*AGL, "runner", "--store", url, "--agent", "mine.py:agent", "--key-file", key, log="runner.log")
    at.until(lambda: statuses(at.directory / "s.db") == ["running"], SECONDS, "an attempt")

    def check() -> None:
        assert "stopped; " in at.text("runner.log")
        at.until(lambda: statuses(at.directory / "s.db") == ["queuing"], 10, "the rollout to be given back")

    return Case(process, check)


async def enqueued(url: str) -> None:
    opened = await open_store(url)
    await opened.enqueue_rollouts([NewRollout("long")])
    await opened.close()


def evaluation(at: Programs) -> Case:
    """Its run is "stopped", and what was open is cancelled, so that it can be resumed."""
    (at.directory / "tasks.jsonl").write_text("".join(f"{i}\n" for i in range(2000)))
    process = at.start(
        *AGL, "eval", "--tasks", "tasks.jsonl", "--agent", "mine.py:agent", "--directory", "out", log="eval.log"
    )
    path = at.until(lambda: next((at.directory / "out").rglob("*.db"), None), SECONDS, "the store")
    at.until(lambda: statuses(path).count("succeeded") >= 3, SECONDS, "three rollouts")

    def check() -> None:
        assert set(statuses(path)) <= {"succeeded", "cancelled"}
        with closing(sqlite3.connect(path)) as connection:
            assert {s for (s,) in connection.execute("SELECT status FROM runs")} == {"stopped"}

    return Case(process, check, (130,))


def command(at: Programs) -> Case:
    """`agl run`: the command gets the signal, and its end is recorded."""
    process = at.start(
        *AGL, "run", "--store", at.directory / "r.db", "--", sys.executable, "-c",
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print('begun', flush=True); time.sleep(99)",
        log="run.log",
    )  # fmt: skip
    at.until(lambda: "begun" in at.text("run.log"), SECONDS, "the command")

    def check() -> None:
        assert statuses(at.directory / "r.db") == ["failed"]

    return Case(process, check, (129, 130, 143, 1))


def serving(at: Programs) -> Case:
    """`agl serve DIR`: an answer that is under way is completed and recorded."""
    (policy,) = at.directory.glob("policy")
    process = at.start(
        *AGL, "serve", policy, "--port", 0, "--json", "facts.json", "--record", "seen.db", log="serving.log"
    )
    facts = at.directory / "facts.json"
    at.until(lambda: facts.exists() and facts.read_text(), SECONDS, "the server")
    url = json.loads(facts.read_text())["url"]
    port = int(url.rpartition(":")[2])
    assert key_file(at, port).exists()
    key = key_file(at, port).read_text()
    body = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 60, "stream": True, "n": 32}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=SECONDS)
    first = answer.readline()

    def check() -> None:
        with answer:
            assert first.startswith(b"data: ")
            assert answer.read().rstrip().endswith(b"data: [DONE]"), "an answer was cut"
        assert not key_file(at, port).exists(), "its key is still there"
        assert not (at.directory / "seen.db-wal").exists(), "the database was not closed"
        assert statuses(at.directory / "seen.db") == ["succeeded"]

    return Case(process, check)


def training(at: Programs, command: str, words: tuple[object, ...], place: Path) -> Case:
    """Commands that train: the checkpoint is saved, the run is "stopped", and how to resume is printed."""
    process = at.start(*AGL, command, *words, log=f"{command}.log")
    at.until(
        lambda: process.poll() is not None or [*(at.directory / place).glob("checkpoints/*")], SECONDS, "a checkpoint"
    )

    def check() -> None:
        text = at.text(f"{command}.log")
        assert "--resume" in text, text[-2000:]
        assert not (at.directory / place / "run.db-wal").exists(), "the database was not closed"
        with closing(sqlite3.connect(at.directory / place / "run.db")) as connection:
            assert {s for (s,) in connection.execute("SELECT status FROM runs")} == {"stopped"}
        assert {*statuses(at.directory / place / "run.db")} <= {"succeeded", "failed", "cancelled"}

    return Case(process, check, (130,))


def sweep(at: Programs) -> Case:
    (at.directory / "tasks.jsonl").write_text("".join(f'{{"question": "{i}"}}\n' for i in range(4)))
    words = ("--over", "group_size=2", "--seeds", 2, "--directory", "all", "--")
    own = (
        "--model", "policy", "--tasks", "tasks.jsonl", "--agent", "mine.py:asking", "--steps", 500, "--batch-size", 2,
        "--max-response-tokens", 6, "--device", "cpu",
    )  # fmt: skip
    case = training(at, "sweep", (*words, *own), Path("all") / "group_size=2_seed=0")

    def check() -> None:
        case.check()
        assert not (at.directory / "all" / "group_size=2_seed=0" / "facts.json").exists(), "it would not be resumed"
        assert not (at.directory / "all" / "group_size=2_seed=1").exists(), "the next run was begun"

    return Case(case.process, check, case.status)


def quickstart(at: Programs) -> Case:
    (at.directory / "qs").mkdir()
    shutil.copytree(at.directory / "policy", at.directory / "qs" / "start-policy")
    (at.directory / "qs" / "start-policy" / SEED_FILE).write_text("0\n")
    return training(at, "quickstart", ("--directory", "qs", "--steps", 500), Path("qs"))


def statuses(path: Path) -> list[str]:
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
            return [status for (status,) in connection.execute("SELECT status FROM rollouts ORDER BY seq")]
    except sqlite3.OperationalError:  # it is being made
        return []


CASES = {
    "store": store, "dashboard": dashboard, "runner": runner, "eval": evaluation, "run": command, "serve": serving,
    "sweep": sweep, "quickstart": quickstart,
}  # fmt: skip
WITH_POLICY = ("serve", "sweep", "quickstart")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("name", CASES)
def test_a_command_ends_as_the_table_says(
    name: str, number: signal.Signals, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    if name in WITH_POLICY:
        shutil.copytree(request.getfixturevalue("untrained_model"), tmp_path / "policy")
    with programs(tmp_path, XDG_STATE_HOME=str(tmp_path / "state"), TMPDIR=str(tmp_path / "temporary")) as at:
        (tmp_path / "temporary").mkdir()
        case = CASES[name](at)
        started = [pid for pid, _ in family(case.process.pid)]
        case.process.send_signal(number)
        # `timeout`, `docker stop` and shells send several. What ends goes on to end.
        end = time.monotonic() + SECONDS
        while case.process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
            if number is not signal.SIGINT and name != "run" and case.process.poll() is None:
                case.process.send_signal(number)
        assert case.process.poll() in case.status, at.text(f"{name}.log")[-2000:]
        assert "Traceback" not in at.text(f"{name}.log")
        case.check()
        at.until(lambda: all(map(gone, started)), 20, "the processes that it had started to be gone")
        assert [*(tmp_path / "temporary").iterdir()] == [], "temporary files are left"


def test_the_table_has_a_row_for_every_command_above() -> None:
    text = (ROOT / "docs" / "runners.md").read_text()
    section = text[text.index("## How commands end") :]
    first_cells = re.findall(r"^\| (`agl [^|]*)", section, re.MULTILINE)
    rows = set(re.findall("`agl ([a-z]+)", " ".join(first_cells)))
    assert rows >= CASES.keys()
    assert local_key.__doc__ is not None
