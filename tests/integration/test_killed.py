"""`kill -9` of what serves, samples and runs: nothing that was acknowledged is lost, and nothing is trained twice."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chaos import trained_once
from processes import AGL, Programs, family, fetch, programs

from agl.trainer.store import open_store

pytestmark = pytest.mark.slow
SECONDS = 240.0


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Programs]:
    with programs(tmp_path) as started:
        yield started


# -- a server for applications ----------------------------------------------------------------------------------------
def served(at: Programs, policy: Path) -> tuple[Any, str]:
    """A server that records, and its address."""
    facts = at.directory / "facts.json"
    facts.unlink(missing_ok=True)
    words = ("serve", policy, "--port", 0, "--no-key", "--record", "seen.db", "--json", facts, "--device", "cpu")
    server = at.start(*AGL, *words, log="serve.log")
    return server, at.until(lambda: json.loads(facts.read_text())["url"], SECONDS, "the server")


def test_an_application_has_no_answer_that_a_killed_server_did_not_record(
    at: Programs, untrained_model: Path, tmp_path: Path
) -> None:
    """It was answered first and recorded then: what eight clients got in the last milliseconds was lost."""
    acknowledged: list[str] = []
    for most in (20, 50, 90):
        server, url = served(at, untrained_model)
        enough = threading.Event()

        def ask(url: str = url, most: int = most, enough: threading.Event = enough) -> None:
            question = {"messages": [{"role": "user", "content": "2 + 2"}], "max_tokens": 2, "n": 4}
            while not enough.is_set():
                try:
                    status, answer = fetch(f"{url}/v1/chat/completions", question)
                except (OSError, ValueError, http.client.HTTPException):
                    return
                assert status == 200
                acknowledged.append(answer["id"])
                if len(acknowledged) >= most:
                    enough.set()

        clients = [threading.Thread(target=ask) for _ in range(8)]
        for client in clients:
            client.start()
        assert enough.wait(SECONDS)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for client in clients:
            client.join()
    with closing(sqlite3.connect(tmp_path / "seen.db")) as connection:
        recorded = {call_id for (call_id,) in connection.execute("SELECT id FROM calls")}
        query = "SELECT DISTINCT status FROM rollouts JOIN calls USING (rollout_id)"
        statuses = [status for (status,) in connection.execute(query)]
    lost = [one for one in acknowledged if one not in recorded]
    assert not lost, f"{len(lost)} of {len(acknowledged)} answers are nowhere"
    assert statuses == ["succeeded"]


# -- a run of two policies --------------------------------------------------------------------------------------------
TEAM = """
import json, sys
from pathlib import Path
import agl
from agl.adapters.langchain import LangChainTracer
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="any", api_key="unused")
writer, checker = create_agent(model, [], name="writer"), create_agent(model, [], name="checker")

@agl.rollout
async def team(task) -> dict[str, float]:
    rewards = {}
    for agent in (writer, checker):
        answer = await agent.ainvoke({"messages": [{"role": "user", "content": task}]})
        rewards[agent.name] = len(answer["messages"][-1].content) % 3
    return rewards

if __name__ == "__main__":
    policy, runners = sys.argv[1:]
    algorithm = agl.GRPO(
        model=policy, batch_size=2, group_size=3, steps=6, max_response_tokens=8, learning_rate=1e-3, device="cpu",
    )
    trainer = agl.Trainer(
        algorithm,
        agents={"writer": "policy-a", "checker": "policy-b"},
        policies={"policy-a": agl.Policy(lr=1e-3), "policy-b": agl.Policy(lr=2e-3)},
        credit=agl.credit.PerAgent(),
        tracer=LangChainTracer(),
        directory="run",
        n_workers=2,
        runners=runners,
        progress=False,
        timeout=120.0,
    )
    result = trainer.fit("team.py:team", [f"what is {i} + {i}?" for i in range(8)], resume=True)
    Path("result.json").write_text(json.dumps({"run_id": result.run_id, "history": result.history}))
"""
POLICIES = ("policy-a", "policy-b")


def steps_saved(directory: Path) -> int:
    """The number of the last step that has a checkpoint."""
    steps = [int(path.name.removeprefix("step-")) for path in (directory / "run" / "checkpoints").glob("step-*")]
    return max(steps, default=0)


@pytest.mark.parametrize("runners", ["local", pytest.param("process", marks=pytest.mark.night)])
@pytest.mark.parametrize("policy", [pytest.param(0, marks=pytest.mark.night), 1], ids=POLICIES)
def test_a_run_of_which_one_policy_is_killed_ends_and_goes_on(
    at: Programs, untrained_model: Path, tmp_path: Path, policy: int, runners: str
) -> None:
    (tmp_path / "team.py").write_text(TEAM)
    (tmp_path / "run").mkdir()
    words = (sys.executable, "team.py", untrained_model, runners)
    first = at.start(*words, log="first.log")
    at.until(lambda: first.poll() is not None or steps_saved(tmp_path) >= 2, SECONDS, "two steps")
    assert first.poll() is None, at.text("first.log")
    policies = [
        pid for pid, _ in family(first.pid) if b"agl.trainer.local" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(policies) == len(POLICIES)
    os.kill(policies[policy], signal.SIGKILL)
    assert first.wait(SECONDS) == 1
    assert "the policy process died (exit code -9)" in at.text("first.log")
    assert steps_saved(tmp_path) < 6
    second = at.start(*words, log="second.log")
    assert second.wait(SECONDS) == 0, at.text("second.log")
    result = json.loads((tmp_path / "result.json").read_text())
    assert [h["step"] for h in result["history"]] == [1, 2, 3, 4, 5, 6]
    for name in POLICIES:
        assert [h[f"{name}/policy_version"] for h in result["history"]] == [1, 2, 3, 4, 5, 6]
    asyncio.run(require_trained_once(tmp_path / "run" / "run.db", result["run_id"]))


async def require_trained_once(path: Path, run_id: str) -> None:
    store = await open_store(str(path))
    try:
        await trained_once(store, await store.query_rollouts(run_id=run_id))
        [run] = await store.query_runs()
        assert (run.run_id, run.status) == (run_id, "succeeded")
    finally:
        await store.close()
