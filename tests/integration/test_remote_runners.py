"""Rollouts that are executed elsewhere: a trainer in one process, `agl runner` in others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from openai import AsyncOpenAI
from processes import free_port
from pydantic import SecretStr
from scripted import ScriptedEngine, in_loop, quick_tokenizer, rendering_of, until
from starlette.requests import Request

import agl
from agl import semconv
from agl.agents.agent import as_agent
from agl.errors import AglError, ConfigError, RolloutError, StoreError
from agl.mdp.selection import select
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http.auth import LEASE_HEADER, Keys, key_hash
from agl.trainer.report.progress import Progress
from agl.trainer.run.config import RunConfig
from agl.trainer.run.run import Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.protocol import Report, RolloutResult
from agl.trainer.runners.remote.client import CoordinatorClient
from agl.trainer.runners.remote.coordinator import coordinator_routes, key_check
from agl.trainer.runners.remote.serialization import METHODS, selection_to_json
from agl.trainer.runners.remote.worker import run_worker
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout, RolloutConfig


class ServedPolicy:
    """A gateway with a scripted policy, and a coordinator, that listen."""

    def __init__(
        self, store: Store, *, key: str | None = None, routed: bool = True, script: Any = ("four",), **options: Any
    ) -> None:
        self.store, self.results = store, []
        self.gateway = Gateway(store)
        tokenizer = quick_tokenizer()
        self.engine = ScriptedEngine(tokenizer, script)
        self.gateway.serve("policy", self.engine, rendering_of(tokenizer))
        self.make = lambda: RunCoordinator(
            store, self.gateway if routed else None, selection=select(None), resources={}, model="policy",
            rules=lambda mode: SamplingRules(temperature=1.0), on_result=self.results.append, **options,
        )  # fmt: skip
        self.coordinator: RunCoordinator | None = self.make()
        self.check = key_check(Keys() if key is None else Keys(key_hash(key)))
        self.results: list[RolloutResult]
        self.server: GatewayServer | None = None
        self.port = 0

    async def start(self) -> str:
        def check(request: Request) -> None:
            self.check(request)

        routes = coordinator_routes(lambda: self.coordinator, check)
        self.server = GatewayServer(self.gateway, port=self.port, extra_routes=routes)
        url = await self.server.start()
        self.port = self.server.port
        assert self.coordinator is not None
        self.coordinator.watch()
        return url

    async def stop(self) -> None:
        assert self.server is not None
        if self.coordinator is not None:
            await self.coordinator.stop()
        await self.server.stop()


@agl.rollout
async def asks(task: Any, llm: agl.LLM) -> float:
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task["q"]}])
    agl.emit_reward({"length": 0.5})
    return 1.0 if answer.choices[0].message.content == "four" else 0.0


@agl.rollout
async def sleeps(task: Any) -> float:
    await asyncio.sleep(task["seconds"])
    return 1.0


@in_loop
async def test_a_rollout_executed_elsewhere_comes_back_whole(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store)
    url = await served.start()
    ids = [r.rollout_id for r in await store.enqueue_rollouts([NewRollout({"q": "2+2"}, group="g")] * 8)]
    end = asyncio.Event()
    working = asyncio.ensure_future(run_worker(as_agent(asks), url, n_workers=3, until=end))
    await until(lambda: len(served.results) == 8)
    end.set()
    await working
    assert {r.rollout.rollout_id for r in served.results} == set(ids)
    for result in served.results:
        assert result.error is None
        assert result.attempt_trajectory is not None
        assert result.attempt_trajectory.reward == 1.5
        assert result.attempt_trajectory.n_calls == 1
        [call] = await store.query_calls(result.rollout.rollout_id)
        assert call.agent == "asks"
        assert call.policy == "policy"
        assert call.response_ids.size
        spans = await store.query_spans(result.rollout.rollout_id)
        assert {s.operation for s in spans} >= {"invoke_agent", "chat", "reward"}
        assert (await store.get_rollout(result.rollout.rollout_id)).status == "succeeded"
    await served.stop()
    await store.close()


@agl.rollout
async def says_much(task: Any) -> float:
    for n in range(12):
        agl.emit_message(f"{n} " + "x" * 400_000)
    agl.emit_message("y" * 2_000_000)
    agl.emit_message("half \ud83d")
    agl.emit_reward({"length": 0.5})
    return 1.0


@in_loop
async def test_a_report_of_any_size_arrives_and_one_span_too_large_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGL_LIMIT_BODY_BYTES", "1000000")
    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, routed=False)
    url = await served.start()
    [rollout] = await store.enqueue_rollouts([NewRollout({})])
    end = asyncio.Event()
    working = asyncio.ensure_future(run_worker(as_agent(says_much), url, n_workers=1, until=end))
    await until(lambda: len(served.results) == 1)
    end.set()
    await working
    [result] = served.results
    assert result.error is None
    assert result.attempt_trajectory is not None
    assert result.attempt_trajectory.reward == 1.5
    texts = [s.attributes[semconv.VALUE] for s in await store.query_spans(rollout.rollout_id) if s.name == "message"]
    assert sorted(str(text)[:6] for text in texts) == sorted([*(f"{n} xxxxx"[:6] for n in range(12)), "half \ud83d"])
    [lost] = [r.getMessage() for r in caplog.records if "does not take" in r.getMessage()]
    assert "span 'message' (" in lost
    assert "AGL_LIMIT_BODY_BYTES" in lost
    await served.stop()
    await store.close()


@in_loop
async def test_a_runner_outlives_its_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it has to bring back when the server is gone, it brings back when there is one again, and says so once."""
    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, routed=False)
    url = await served.start()
    [rollout] = await store.enqueue_rollouts([NewRollout({"seconds": 0.5})])
    end = asyncio.Event()
    working = asyncio.ensure_future(run_worker(as_agent(sleeps), url, n_workers=2, until=end))
    await until(lambda: served.coordinator is not None and served.coordinator._open)
    assert served.server is not None
    await served.server.stop()
    await asyncio.sleep(1.0)
    served.coordinator = served.make()  # as a server that was started anew
    await served.start()
    await until(lambda: served.results)
    end.set()
    await working
    assert served.results[0].rollout.status == "succeeded"
    assert (await store.get_rollout(rollout.rollout_id)).attempts == 1
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("the server at")]
    assert ["does not answer" in said[0], "is back" in said[1], len(said)] == [True, True, 2]
    await served.stop()
    await store.close()


@in_loop
async def test_a_silent_runner_is_given_up_and_its_rollout_run_elsewhere(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, routed=False, silent_seconds=0.3)
    url = await served.start()
    config = RolloutConfig(max_attempts=2, retry_on=("unresponsive",))
    [rollout] = await store.enqueue_rollouts([NewRollout({"seconds": 0.0}, config=config)])
    dead = CoordinatorClient(url)
    lease = await dead.lease("dead", 5.0)
    assert lease is not None
    end = asyncio.Event()
    working = asyncio.ensure_future(run_worker(as_agent(sleeps), url, until=end))
    await until(lambda: served.results)
    end.set()
    await working
    attempts = await store.query_attempts(rollout.rollout_id)
    assert [a.status for a in attempts] == ["unresponsive", "succeeded"]
    assert "has not been heard of" in str(attempts[0].error)
    assert not await dead.heartbeat(lease)
    await dead.close()
    await served.stop()
    await store.close()


class Refusing:
    """A store that refuses the first time an attempt is to fail, as one whose disk is full."""

    def __init__(self, store: Store) -> None:
        self._store, self.refused = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def update_attempt(self, rollout_id: str, attempt: int, status: Any, *, error: str | None = None) -> Any:
        if status == "failed" and not self.refused:
            self.refused += 1
            raise StoreError("the disk is full")
        return await self._store.update_attempt(rollout_id, attempt, status, error=error)


@in_loop
async def test_a_lease_that_could_not_be_given_back_can_be_given_back_again(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    coordinator = RunCoordinator(cast(Store, Refusing(store)), selection=select(None), resources={})
    [rollout] = await store.enqueue_rollouts([NewRollout({"seconds": 0.0})])
    lease = await coordinator.lease("w", 0.0)
    assert lease is not None
    with pytest.raises(StoreError, match="the disk is full"):
        await coordinator.abandon(lease, "its runner was stopped")
    assert (await store.get_rollout(rollout.rollout_id)).status == "running"
    await coordinator.abandon(lease, "its runner was stopped")
    assert (await store.get_rollout(rollout.rollout_id)).status == "queuing"
    await store.close()


@in_loop
async def test_a_run_does_not_wait_for_runners_for_ever(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    run = Run(
        RunConfig(runners="remote", runner_patience=1.0), run_id="run-1", seed=0,
        directory=tmp_path, agent=as_agent(sleeps), train=[], val=[], store=store, progress=Progress(False),
    )  # fmt: skip
    workplace = Workplace(run)
    await workplace.start(lambda mode: SamplingRules(), "policy", routed=False)
    with pytest.raises(RolloutError, match=r"no runner has been heard of for \d+ s, and 2 rollouts wait for one"):
        await workplace.rollouts([(0, {"seconds": 0}), (1, {"seconds": 0})], mode="train", step=0)
    await workplace.stop()
    assert {r.status for r in await store.query_rollouts()} == {"cancelled"}
    await store.close()


@in_loop
async def test_a_lease_that_is_asked_for_twice_is_the_same(tmp_path: Path) -> None:
    import httpx

    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, routed=False)
    url = await served.start()
    await store.enqueue_rollouts([NewRollout({"seconds": 0.0})] * 2)
    body = {"worker_id": "w", "wait": 1.0, "request_id": "same"}
    async with httpx.AsyncClient(trust_env=False) as client:
        first, second = [(await client.post(f"{url}/runner/lease", json=body)).json() for _ in range(2)]
    assert first == second
    await served.stop()
    await store.close()


@in_loop
async def test_what_a_stopped_worker_leased_unheard_is_free_again_at_once(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, routed=False)
    url = await served.start()
    leaving = CoordinatorClient(url)
    asking = asyncio.ensure_future(leaving.lease("leaving", 20.0))
    await asyncio.sleep(0.3)
    asking.cancel()
    await asyncio.wait((asking,))
    [rollout] = await store.enqueue_rollouts([NewRollout({"seconds": 0.0}, config=RolloutConfig(max_attempts=1))])
    other = CoordinatorClient(url)
    lease = await other.lease("other", 5.0)
    assert lease is not None
    assert (lease.rollout.rollout_id, lease.attempt) == (rollout.rollout_id, 1)
    for coordinator in (leaving, other):
        await coordinator.close()
    await served.stop()
    await store.close()


LEASE: dict[str, Any] = {"rollout_id": "{id}", "attempt": 1}
MALFORMED: list[Any] = [
    None, [], "x", {}, {"lease": {"rollout_id": 1, "attempt": "x"}}, {"lease": {"rollout_id": "none", "attempt": 1}},
    {"worker_id": 1, "request_id": [], "wait": "long"}, {"worker_id": "w", "request_id": "r", "wait": None},
    {"lease": {**LEASE, "attempt": 2**80}}, {"lease": {**LEASE, "attempt": 2**31}, "why": "x"}, {"lease": 7},
    {"lease": {**LEASE, "rollout_id": "\0"}, "why": "x"}, {"lease": LEASE, "report": None},
    {"lease": LEASE, "report": {"spans": {}, "error": 7}}, {"lease": LEASE, "spans": [7]}, {"lease": LEASE, "spans": 7},
    {"lease": LEASE, "report": {"spans": [{"span_id": 7}]}},
    {"lease": LEASE, "report": {"error": {"type": "AglError"}}},
]  # fmt: skip


@in_loop
async def test_what_no_runner_sends_is_refused(tmp_path: Path) -> None:
    import httpx

    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, routed=False)
    url = await served.start()
    [rollout] = await store.enqueue_rollouts([NewRollout({"seconds": 0.0})])
    coordinator = CoordinatorClient(url)
    lease = await coordinator.lease("w", 5.0)
    assert lease is not None
    secret = str(lease.attempted_rollout.secret)
    async with httpx.AsyncClient(trust_env=False) as client:
        for what in METHODS:
            for body in MALFORMED:
                sent = json.loads(json.dumps(body).replace("{id}", rollout.rollout_id))
                got = await client.post(f"{url}/runner/{what}", json=sent, headers={LEASE_HEADER: secret})
                assert 400 <= got.status_code < 500, (what, body, got.status_code, got.text)
            for kind, status in (("application/json", 400), ("text/plain", 415)):
                headers = {"content-type": kind}
                got = await client.post(f"{url}/runner/{what}", content=b"\xff{", headers=headers)
                assert got.status_code == status
    assert (await store.get_rollout(rollout.rollout_id)).status == "running"
    assert await store.query_spans(rollout.rollout_id) == []
    await coordinator.close()
    await served.stop()
    await store.close()


@in_loop
async def test_a_runner_of_an_earlier_release_is_told_what_to_upgrade(tmp_path: Path) -> None:
    import httpx

    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, routed=False)
    url = await served.start()
    bodies = {"lease": {"worker": "w", "wait": 1.0, "request": "r"}, "heartbeat": {"rollout_id": "r", "attempt": 1}}
    async with httpx.AsyncClient(trust_env=False) as client:
        for what, body in bodies.items():
            got = await client.post(f"{url}/runner/{what}", json=body)
            assert got.status_code == 400
            # Its own error ends with this message.
            assert "upgrade agl where it runs" in got.json()["error"]["message"]
    await served.stop()
    await store.close()


@in_loop
async def test_an_error_comes_back_as_what_it_was_or_as_a_rollouts(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, routed=False)
    coordinator = CoordinatorClient(await served.start())
    await store.enqueue_rollouts([NewRollout({"seconds": 0.0}, config=RolloutConfig(max_attempts=1))] * 2)
    for error, kind in (
        (AglError("odd", hint="none", path="here"), AglError),
        (KeyError("\ud800"), RolloutError),
    ):
        lease = await coordinator.lease("w", 5.0)
        assert lease is not None
        await coordinator.finish(lease, Report(error=error))
        assert type(served.results[-1].error) is kind
    attempts = [await store.query_attempts(r.rollout.rollout_id) for r in served.results]
    assert "odd" in str(attempts[0][0].error)
    await coordinator.close()
    await served.stop()
    await store.close()


@in_loop
async def test_a_runner_needs_the_key(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, key="right", routed=False)
    url = await served.start()
    for key in (None, "wrong", "righ"):
        with pytest.raises(RolloutError, match=r"does not know this key(.|\n)*AGL_RUNNER_KEY"):
            await run_worker(as_agent(sleeps), url, key=key)
    coordinator = CoordinatorClient(url, "right")
    assert await coordinator.lease("w", 0.0) is None
    await coordinator.close()
    await served.stop()
    await store.close()


@in_loop
async def test_a_server_that_hands_out_no_rollouts_is_named(tmp_path: Path) -> None:
    store = await open_store("memory")
    server = GatewayServer(Gateway(store))
    url = await server.start()
    with pytest.raises(RolloutError, match="hands out no rollouts"):
        await run_worker(as_agent(sleeps), url)
    await server.stop()
    coordinator = CoordinatorClient(f"http://127.0.0.1:{free_port()}", lost_seconds=0.5)
    with pytest.raises(RolloutError, match="the server does not answer"):
        await coordinator.lease("w")
    await coordinator.close()
    await store.close()


def test_a_function_cannot_select_for_remote_runners() -> None:
    with pytest.raises(ConfigError, match="'by_length'"):
        selection_to_json(select(by_length))


def by_length(name: str) -> bool:
    return len(name) > 3


@in_loop
async def test_rules_that_only_the_runner_knows_reward_the_call_that_asked_for_the_tool(tmp_path: Path) -> None:
    from langchain.agents import create_agent
    from langchain.tools import tool
    from langchain_openai import ChatOpenAI
    from scripted import calls_once

    @tool
    def calculator(expression: str) -> str:
        """Calculate."""
        return "5"

    def reward(task: Any, output: Any) -> float:
        return 1.0

    air = agl.AIR()

    @air.on_tool_success
    def tool_ok(tool_name: str, output: str) -> float:
        return 0.25 if (tool_name, output) == ("calculator", "5") else -1.0

    model = ChatOpenAI(model="m", base_url="http://provider.invalid/v1", api_key=SecretStr("sk"), max_retries=0)
    agent = agl.wrap(create_agent(model, [calculator], name="solver"), reward=reward)
    store = await open_store(str(tmp_path / "s.db"))
    served = ServedPolicy(store, script=calls_once("calculator", {"expression": "2 + 3"}, "5"))
    url = await served.start()
    await store.enqueue_rollouts([NewRollout({"question": "2 + 3"})])
    end = asyncio.Event()
    working = asyncio.ensure_future(run_worker(agent, url, air=air, until=end))
    await until(lambda: served.results)
    end.set()
    await working
    built = served.results[0].attempt_trajectory
    assert built is not None, served.results[0].error
    first, second = built.trajectory.transitions
    assert [(r.name, r.value, r.source) for r in first.rewards] == [("tool_ok", 0.25, "air")]
    assert second.rewards == ()
    assert built.reward == 1.25
    await served.stop()
    await store.close()
