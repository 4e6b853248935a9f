"""A store whose file is deleted, moved or replaced while it is used is noticed and said; SQLite itself says nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from processes import AGL, fetch, free_port, programs

from agl.errors import StoreError, StoreGoneError
from agl.trainer.store import open_store
from agl.trainer.store.types import NewRollout, TrainingRun


def moved(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))


def replaced(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


WAYS: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "was deleted or moved away"),
    "moved": (moved, "was deleted or moved away"),
    "folder deleted": (lambda path: shutil.rmtree(path.parent), "was deleted or moved away"),
    "folder moved": (lambda path: moved(path.parent), "was deleted or moved away"),
    "replaced": (replaced, "was replaced by another one"),
    "journal deleted": (lambda path: Path(f"{path}-wal").unlink(), "-wal was deleted or moved away"),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_acknowledged_that_nobody_can_find(way: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "run.db"
    lose, message = WAYS[way]

    async def scenario() -> None:
        store = await open_store(str(path))
        await store.enqueue_rollouts([NewRollout("t", rollout_id="before")])
        lose(path)
        for ask in (
            lambda: store.enqueue_rollouts([NewRollout("t", rollout_id="after")]),
            lambda: store.get_rollout("before"),
            lambda: store.put_run(TrainingRun("run")),
        ):
            with pytest.raises(StoreGoneError, match=message) as raised:
                await ask()
            assert "put it back, with its journal" in str(raised.value)
        await store.close()

    asyncio.run(scenario())


def test_a_file_that_was_put_back_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "run.db"

    async def scenario() -> None:
        store = await open_store(str(path))
        await store.enqueue_rollouts([NewRollout("t", rollout_id="before")])
        path.rename(tmp_path / "away")
        with pytest.raises(StoreError):
            await store.enqueue_rollouts([NewRollout("t", rollout_id="lost")])
        (tmp_path / "away").rename(path)
        await store.enqueue_rollouts([NewRollout("t", rollout_id="after")])
        await store.close()
        again = await open_store(str(path))
        assert [r.rollout_id for r in await again.query_rollouts()] == ["before", "after"]
        await again.close()

    asyncio.run(scenario())


# -- of real programs -------------------------------------------------------------------------------------------------
MINE = """
import asyncio
import agl

@agl.rollout
async def agent(task):
    await asyncio.sleep(0.3)
    return 1.0
"""
SCRIPT = """
import sys
import agl

if __name__ == "__main__":
    trainer = agl.Trainer(agl.Baseline(), runners=sys.argv[1], n_workers=2, directory="out")
    trainer.fit("mine.py:agent", list(range(2000)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["folder deleted", "moved"])
@pytest.mark.parametrize("kind", ["agl eval", "local", "process"])
def test_a_run_without_its_store_ends_and_says_why(kind: str, way: str, tmp_path: Path) -> None:
    """Workers in processes would try to report for ten minutes, and nobody would be told."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{i}\n" for i in range(2000)))
    evaluate = (*AGL, "eval", "--tasks", "tasks.jsonl", "--agent", "mine.py:agent", "--directory", "out")
    with programs(tmp_path) as at:
        words = evaluate if kind == "agl eval" else (sys.executable, "script.py", kind)
        run = at.start(*words, log="run.log")

        def found() -> Path | None:
            assert run.poll() is None, at.text("run.log")
            paths = [*(tmp_path / "out").rglob("*.db")]
            return paths[0] if paths and ended(paths[0]) >= 3 else None

        WAYS[way][0](at.until(found, 240, "three rollouts"))
        assert run.wait(90) == 1
        said = " ".join(at.text("run.log").split())
        assert "was deleted or moved away while it was in use" in said
        assert "put it back, with its journal (-wal), and resume" in said
        assert kind != "agl eval" or "Traceback" not in said


ASKING = """
import agl

@agl.rollout
def agent(task, llm: agl.LLM):
    import openai

    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    asked = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": str(task)}])
    return float(len(asked.choices[0].message.content or "") % 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["folder deleted", "moved"])
def test_a_sweep_without_its_store_ends_and_says_why(way: str, untrained_model: Path, tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{i}\n" for i in range(4)))
    place = tmp_path / "all" / "group_size=2_seed=0"
    own = (
        "--model", untrained_model, "--tasks", "tasks.jsonl", "--agent", "asking.py:agent", "--steps", 500,
        "--batch-size", 2, "--max-response-tokens", 4, "--device", "cpu",
    )  # fmt: skip
    with programs(tmp_path) as at:
        words = ("--over", "group_size=2", "--seeds", 2, "--directory", "all", "--", *own)
        sweep = at.start(*AGL, "sweep", *words, log="sweep.log")
        at.until(lambda: sweep.poll() is not None or [*place.glob("checkpoints/*")], 240, "a checkpoint")
        assert sweep.poll() is None, at.text("sweep.log")
        WAYS[way][0](place / "run.db")
        assert sweep.wait(90) == 1
        said = " ".join(at.text("sweep.log").split())
        assert "was deleted or moved away while it was in use" in said
        assert "the first run failed; no other was tried" in said
        assert "Traceback" not in said


@pytest.mark.slow
def test_a_runner_whose_store_lost_its_file_is_told(tmp_path: Path) -> None:
    """Its server ends; what the runner has acknowledged to nobody is run again."""
    (tmp_path / "mine.py").write_text(MINE)
    port = free_port()

    async def enqueue() -> None:
        store = await open_store(str(tmp_path / "s.db"))
        await store.enqueue_rollouts([NewRollout(i) for i in range(500)])
        await store.close()

    asyncio.run(enqueue())
    with programs(tmp_path, XDG_STATE_HOME=str(tmp_path / "state")) as at:
        url = f"http://127.0.0.1:{port}"
        server = at.start(*AGL, "store", "--db", tmp_path / "s.db", "--port", port, log="store.log")
        at.until(lambda: fetch(f"{url}/health")[0] == 200, 90, "the store")
        key = tmp_path / "state" / "agl" / "keys" / f"127.0.0.1-{port}"
        (tmp_path / "key").write_text(key.read_text())
        words = ("--store", url, "--agent", "mine.py:agent", "--key-file", tmp_path / "key")
        runner = at.start(*AGL, "runner", *words, log="runner.log")
        at.until(lambda: ended(tmp_path / "s.db") >= 3, 90, "three rollouts")
        moved(tmp_path / "s.db")
        assert server.wait(60) == 1
        assert "was deleted or moved away while it was in use" in " ".join(at.text("store.log").split())
        at.until(lambda: "does not answer" in at.text("runner.log"), 60, "the runner to say so")
        assert runner.poll() is None
        assert "Traceback" not in at.text("runner.log")


def ended(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        try:
            return connection.execute("SELECT count(*) FROM rollouts WHERE status = 'succeeded'").fetchone()[0]
        except sqlite3.OperationalError:  # it is being made
            return 0


@pytest.mark.slow
def test_a_recorded_program_without_its_store_ends_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with programs(tmp_path) as at:
        program = "import time; print('begun', flush=True); time.sleep(3)"
        run = at.start(*AGL, "run", "--store", "folder/r.db", "--", sys.executable, "-c", program, log="run.log")
        at.until(lambda: "begun" in at.text("run.log"), 240, "the program")
        shutil.rmtree(tmp_path / "folder")
        assert run.wait(90) == 1
        assert "was deleted or moved away while it was in use" in " ".join(at.text("run.log").split())
        assert "Traceback" not in at.text("run.log")


@pytest.mark.slow
def test_a_served_policy_answers_without_its_store_and_says_once_that_nothing_is_recorded(
    untrained_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    asked = {"messages": [{"role": "user", "content": "2 + 2"}], "max_tokens": 4}
    with programs(tmp_path) as at:
        words = ("serve", untrained_model, "--port", 0, "--no-key", "--record", "folder/s.db", "--json", "facts.json")
        server = at.start(*AGL, *words, log="serve.log")
        url = at.until(lambda: json.loads((tmp_path / "facts.json").read_text())["url"], 240, "the server")
        assert fetch(f"{url}/v1/chat/completions", asked)[0] == 200
        shutil.rmtree(tmp_path / "folder")
        assert [fetch(f"{url}/v1/chat/completions", asked)[0] for _ in range(3)] == [200] * 3
        server.terminate()
        assert server.wait(90) == 0
        said = " ".join(at.text("serve.log").split())
        assert said.count("calls are not recorded") == 1
        assert "was deleted or moved away while it was in use" in said


@pytest.mark.slow
def test_a_server_without_its_store_ends_and_says_why(tmp_path: Path) -> None:
    port = free_port()
    with programs(tmp_path) as at:
        server = at.start(*AGL, "store", "--db", tmp_path / "s.db", "--port", port, log="store.log")
        at.until(lambda: fetch(f"http://127.0.0.1:{port}/health")[0] == 200, 90, "the store")
        (tmp_path / "s.db").unlink()
        assert server.wait(60) == 1
        assert "was deleted or moved away while it was in use" in " ".join(at.text("store.log").split())
        assert "Traceback" not in at.text("store.log")
