"""Agents that look for the keys of the runner they run under, and runners that want what is not theirs.

Servers, runners and agents are real processes. An attack has succeeded if a request of it is admitted, or if the store
is afterwards not as the honest side left it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from launching import environment, launch
from processes import AGL, Programs, fetch, free_port, programs
from running import fit, say
from scripted import in_loop, until
from store_server import OPERATOR, RUNNER

import agl
from agl import semconv
from agl.agents.agent import as_agent
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.testing.provider import serve
from agl.tracing import otlp
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http.auth import Keys
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.lease_guard import LeaseGuard
from agl.trainer.runners.protocol import Lease, Report
from agl.trainer.runners.remote.client import CoordinatorClient
from agl.trainer.runners.remote.coordinator import coordinator_routes, key_check
from agl.trainer.runners.remote.worker import run_worker
from agl.trainer.store import open_store
from agl.trainer.store.http.client import HttpStore
from agl.trainer.store.types import NewRollout, RolloutConfig

SPY = """
import json, os, pathlib, re, sys, urllib.error, urllib.request

task, words = json.load(sys.stdin), {}

def collect(source, data):
    for word in re.findall(rb"[A-Za-z0-9_-]{16,}", data):
        words.setdefault(word.decode(), source)

for name, value in os.environ.items():
    collect("os.environ", value.encode())
pid, above = os.getpid(), ["self"]
while pid > 1:
    pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    above.append(pid)
    if b"agl" not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
        break
refused = []
for each in above[:-1]:
    try:
        collect(f"/proc/{each}/environ", pathlib.Path(f"/proc/{each}/environ").read_bytes())
    except OSError:
        refused.append(f"/proc/{each}/environ")
    if each == "self":
        continue
    try:
        with open(f"/proc/{each}/mem", "rb", 0) as memory:
            for line in pathlib.Path(f"/proc/{each}/maps").read_text().splitlines():
                area, mode = line.split()[:2]
                start, end = (int(n, 16) for n in area.split("-"))
                if "rw" in mode:
                    try:
                        memory.seek(start)
                        found = re.findall(rb"Bearer ([A-Za-z0-9_-]{16,})", memory.read(end - start))
                    except (OSError, ValueError, OverflowError):
                        continue
                    for word in found:
                        words.setdefault(word.decode(), f"/proc/{each}/mem")
    except OSError:
        refused.append(f"/proc/{each}/mem")

def ask(path, body, key):
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(task["server"] + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")

mine = {"rollout_id": os.environ["AGL_ROLLOUT_ID"], "attempt": int(os.environ["AGL_ATTEMPT"])}
span = {**mine, "trace_id": "3" * 32, "span_id": "4" * 16, "parent_id": None, "name": "reward",
        "start": 1.0, "end": 2.0, "attributes": {"gen_ai.operation.name": "reward", "agl.reward.name": "reward",
                                                "agl.reward.value": 1e6, "agl.reward.primary": True}}
admitted = []
for word, source in words.items():
    for path, body in (
        ("/v1/store/about", None),
        ("/runner/lease", {"worker_id": "spy", "request_id": "spy", "wait": 0}),
        ("/runner/finish", {"lease": mine, "report": {"spans": [span], "error": None}}),
        ("/v1/store/get_rollout", {"rollout_id": task["victim"]}),
        ("/v1/store/dequeue_rollout", {"worker_id": "spy"}),
        ("/v1/store/query_rollouts", {}),
    ):
        status, answer = ask(path, body, word) if body is not None else (0, "")
        if status and status < 300:
            admitted.append([source, path, answer])
print(json.dumps({"admitted": admitted, "refused": refused, "tried": len(words)}))
"""

AGENT = """
import json, sys
import agl

def reward(task, output):
    with open("said.jsonl", "a") as file:
        file.write(output + "\\n")
    return 0.25

agent = agl.CommandAgent([sys.executable, "spy.py"], reward=reward, name="spy")
"""
UNPRIVILEGED = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
"""Root may read every process; in a container it may not."""


class Served:
    """`agl store` with keys, as a process that can be killed and started again."""

    def __init__(self, started: Programs) -> None:
        self.programs, self.port = started, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = self.programs.start(*AGL, "store", "--db", "store.db", "--port", self.port, log="store.log")
        self.programs.until(lambda: fetch(f"{self.url}/health")[0] == 200, 60, "the store")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with programs(tmp_path, AGL_OPERATOR_KEY=OPERATOR, AGL_RUNNER_KEY=RUNNER) as started:
        yield Served(started)


def reward_span(rollout_id: str, value: float = 1e6) -> Span:
    facts = {
        semconv.OPERATION_NAME: semconv.REWARD, semconv.REWARD_NAME: "reward", semconv.REWARD_VALUE: value,
        semconv.REWARD_PRIMARY: True, semconv.ROLLOUT_ID: rollout_id, semconv.ATTEMPT: 1,
    }  # fmt: skip
    return Span("3" * 32, "4" * 16, None, rollout_id, 1, "reward", 1.0, 2.0, attributes=facts)


# -- an agent that wants its runner's key -----------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform != "linux", reason="looks for keys in /proc")
def test_a_command_under_a_runner_finds_no_key_that_opens_anything(tmp_path: Path, served: Served) -> None:
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "agent.py").write_text(AGENT)

    async def enqueue() -> tuple[str, str]:
        operator = await HttpStore.open(served.url, key=OPERATOR)
        [victim] = await operator.enqueue_rollouts([NewRollout("a secret task", run_id="others")])
        [mine] = await operator.enqueue_rollouts([NewRollout({"server": served.url, "victim": victim.rollout_id})])
        await operator.close()
        return mine.rollout_id, victim.rollout_id

    async def facts() -> tuple[Any, list[Span], Any]:
        operator = await HttpStore.open(served.url, key=OPERATOR)
        try:
            rollout = await operator.get_rollout(mine)
            return rollout, await operator.query_spans(mine), await operator.get_rollout(victim)
        finally:
            await operator.close()

    mine, victim = asyncio.run(enqueue())
    words = [*UNPRIVILEGED, *AGL, "runner", "--store", served.url, "--agent", "agent.py:agent"]
    started = served.programs
    started.environment["OPENAI_API_KEY"] = "sk-" + "o" * 40
    runner = started.start(*words, log="runner.log")
    started.until(lambda: asyncio.run(facts())[0].status in ("succeeded", "failed"), 120, "the rollout")
    rollout, spans, other = asyncio.run(facts())
    assert [s.attributes[semconv.REWARD_VALUE] for s in spans if s.operation == semconv.REWARD] == [0.25]
    assert rollout.status == "succeeded"
    assert (other.status, other.attempts) == ("queuing", 0)
    said = (tmp_path / "said.jsonl").read_text()
    assert '"admitted": []' in said, said
    refused = said.partition('"refused"')[2]
    assert f"/proc/{runner.pid}/environ" in refused
    assert f"/proc/{runner.pid}/mem" in refused
    assert runner.poll() is None
    try:
        assert RUNNER.encode() not in Path(f"/proc/{runner.pid}/environ").read_bytes(), "root reads it here"
    except PermissionError:
        pass


SEES = """
import json, os
print(json.dumps({n: v for n, v in os.environ.items() if n.startswith(("AGL_", "OPENAI_API", "MY_"))}))
"""


@agl.rollout
def sees_its_environment(task: Any, llm: agl.LLM) -> float:
    say(llm, "q")
    agls = {n for n in os.environ if n.startswith("AGL_") or os.environ[n] in (OPERATOR, RUNNER)}
    return float(not agls and os.environ["OPENAI_API_KEY"] == "sk-own" and os.environ["MY_SETTING"] == "1")


@pytest.mark.parametrize("runners", ["process", pytest.param("ray", marks=pytest.mark.night)])
def test_worker_processes_have_their_users_keys_and_none_of_agls(
    runners: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if runners == "ray":
        pytest.importorskip("ray")
    for name, value in {
        "AGL_OPERATOR_KEY": OPERATOR, "AGL_RUNNER_KEY": RUNNER, "AGL_DATABASE_URL": "postgresql://u:p@h/d",
        "OPENAI_API_KEY": "sk-own", "MY_SETTING": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert fit(sees_its_environment, [{}], tmp_path, runners=runners).rewards == [1.0]
    assert os.environ["AGL_OPERATOR_KEY"] == OPERATOR, "the user's own process keeps what it has"


def test_a_command_of_agl_run_has_its_users_keys_and_none_of_agls(tmp_path: Path) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    with serve() as provider:
        more = {"AGL_OPERATOR_KEY": OPERATOR, "AGL_STORE": str(tmp_path / "x.db"), "MY_SETTING": "1"}
        done = launch(tmp_path, environment(provider, **more), "--", sys.executable, "sees.py")
    assert done.returncode == 0, done.stderr
    assert OPERATOR not in done.stdout
    assert '"MY_SETTING": "1"' in done.stdout
    assert '"OPENAI_API_KEY"' in done.stdout
    assert '"AGL_STORE"' not in done.stdout
    assert '"AGL_ROLLOUT_ID"' in done.stdout
    assert (tmp_path / "x.db").exists()


# -- a runner that wants another's lease ------------------------------------------------------------------------------
@in_loop
async def test_a_second_worker_cannot_report_on_the_firsts_lease(served: Served) -> None:
    operator = await HttpStore.open(served.url, key=OPERATOR)
    await operator.enqueue_rollouts([NewRollout("first"), NewRollout("second"), NewRollout("third")])
    *_, third = await operator.query_rollouts()
    one, two = CoordinatorClient(served.url, RUNNER), CoordinatorClient(served.url, RUNNER)
    lease, other = await one.lease("one", 5.0), await two.lease("two", 5.0)
    assert lease is not None
    assert other is not None
    rollout_id, attempt = lease.id
    spans = otlp.encode([reward_span(rollout_id)])
    about = {"rollout_id": rollout_id, "attempt": attempt}
    span = {"rollout_id": rollout_id, "attempt": 1, "trace_id": "3" * 32, "span_id": "4" * 16, "parent_id": None,
            "name": "reward", "start": 1.0, "end": 2.0,
            "attributes": dict(reward_span(rollout_id).attributes)}  # fmt: skip

    async def attack() -> None:
        before = await facts()
        async with httpx.AsyncClient(trust_env=False, base_url=served.url, timeout=30) as http:
            for secret in (None, "", "x" * 43, other.attempted_rollout.secret, f"x,{other.attempted_rollout.secret}"):
                headers = {"authorization": f"Bearer {RUNNER}"} | ({} if secret is None else {"agl-lease": secret})
                for path, body in (
                    ("/runner/heartbeat", {"lease": about}),
                    ("/runner/deliver", {"lease": about, "spans": [span]}),
                    ("/runner/finish", {"lease": about, "report": {"spans": [span], "error": None}}),
                    ("/runner/abandon", {"lease": about, "why": "mine now"}),
                    ("/v1/store/update_attempt", {**about, "status": "succeeded"}),
                    ("/v1/store/heartbeat", about),
                    ("/v1/store/get_rollout", {"rollout_id": rollout_id}),
                    ("/v1/store/get_rollout", {"rollout_id": rollout_id[:4]}),
                    ("/v1/store/get_rollout", {"rollout_id": third.rollout_id}),
                    ("/v1/store/query_attempts", {"rollout_id": rollout_id}),
                    ("/v1/store/is_leased_with", {**about, "secrets": ["x"]}),
                    ("/v1/store/add_spans", {"spans": [span]}),
                ):
                    got = await http.post(path, json=body, headers=headers)
                    assert got.status_code in (403, 409), (path, secret, got.status_code, got.text)
                    assert b"first" not in got.content
                    assert b"third" not in got.content
                for body in (spans, otlp.encode([Span("5" * 32, "6" * 16, None, "", 0, "s", 1.0, 2.0)])):
                    got = await http.post("/v1/traces", json=body, headers=headers)
                    assert got.json()["partialSuccess"]["rejectedSpans"] == "1"
                method = {"method": "update_attempt", "arguments": {**about, "status": "failed"}}
                got = await http.post("/v1/store/batch", json={"operations": [method]}, headers=headers)
                assert "error" in got.json()["results"][0]
        assert await facts() == before

    async def facts() -> Any:
        rollouts = await operator.query_rollouts()
        attempts = [await operator.query_attempts(r.rollout_id) for r in rollouts]
        return rollouts, attempts, [await operator.query_spans(r.rollout_id) for r in rollouts]

    await attack()
    # Whoever has the lease goes on, also with a server that was killed, which still knows it.
    served.kill()
    await asyncio.to_thread(served.start)
    await attack()
    assert await one.heartbeat(lease)
    await one.finish(lease, Report([reward_span(rollout_id, 0.5)]))
    assert (await operator.get_rollout(rollout_id)).status == "succeeded"
    [stored] = await operator.query_spans(rollout_id)
    assert stored.attributes[semconv.REWARD_VALUE] == 0.5
    for client in (one, two, operator):
        await client.close()


# -- a thief that takes work and does none of it ----------------------------------------------------------------------
@agl.rollout
async def works(task: Any) -> float:
    await asyncio.sleep(0.05)
    return 1.0


@pytest.mark.parametrize("how", ["one name", "new names", "new names with heartbeats"])
@in_loop
async def test_a_thief_with_the_runners_key_does_not_stall_a_step(how: str, tmp_path: Path) -> None:
    """Times are shortened: 20 s for the first heartbeat to 1.5 s, 60 s for an attempt to 2 s."""
    store = await open_store(str(tmp_path / "s.db"))
    results: list[Any] = []
    coordinator = RunCoordinator(
        store, selection=select(None), resources={}, on_result=results.append, silent_seconds=30.0,
        guard=LeaseGuard(patience=2.0, first_heartbeat=1.5),
    )  # fmt: skip
    keys = Keys.of(OPERATOR, RUNNER)
    server = GatewayServer(Gateway(store), extra_routes=coordinator_routes(lambda: coordinator, key_check(keys)))
    url = await server.start()
    coordinator.watch()
    end = asyncio.Event()
    honest = asyncio.ensure_future(run_worker(as_agent(works), url, key=RUNNER, n_workers=2, name="honest", until=end))
    config = RolloutConfig(max_attempts=2, timeout_seconds=600.0)
    await store.enqueue_rollouts([NewRollout("warm-up", config=config)] * 4)
    await until(lambda: len(results) == 4)
    # A heartbeat of the honest comes only every five seconds; their attempts end before.
    stolen: list[Lease] = []
    thief = CoordinatorClient(url, RUNNER)

    async def steal(number: int) -> None:
        names = iter(range(10**6))
        while not end.is_set():
            name = "thief" if how == "one name" else f"thief-{number}-{next(names)}"
            lease = await thief.lease(name, 0.2)
            if lease is not None:
                stolen.append(lease)

    async def keep() -> None:
        while not end.is_set():
            for lease in list(stolen):
                await thief.heartbeat(lease)
            await asyncio.sleep(0.2)

    thieves = [asyncio.ensure_future(steal(number)) for number in range(8)]
    if how.endswith("heartbeats"):
        thieves.append(asyncio.ensure_future(keep()))
    await asyncio.sleep(0.5)
    await store.enqueue_rollouts([NewRollout("step", config=config)] * 24)
    async with asyncio.timeout(60):
        while len(results) < 28:
            await asyncio.sleep(0.05)
    assert stolen, "the thief has stolen nothing, so this shows nothing"
    assert {r.error for r in results} == {None}
    assert {r.rollout.status for r in results} == {"succeeded"}
    if how == "one name":
        assert len(stolen) <= 3, "it waits longer after each lease that it loses"
    assert not any([await thief.heartbeat(lease) for lease in stolen]), "all of it was taken back"
    end.set()
    await asyncio.gather(honest, *thieves)
    await thief.close()
    await coordinator.stop()
    await server.stop()
    await store.close()
