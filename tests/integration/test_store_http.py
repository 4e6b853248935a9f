"""What a store over HTTP adds to a store: a server that dies and comes back, keys, long polls, and its command."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from store_server import KEYS, OPERATOR, RUNNER, ServedStore, served

from agl.errors import ConfigError, StoreError
from agl.mdp.spans import Span
from agl.trainer.http.auth import Keys
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.http import protocol
from agl.trainer.store.http.client import HttpStore
from agl.trainer.store.http.server import StoreServer
from agl.trainer.store.types import NewRollout, RolloutConfig


def span(rollout_id: str, number: int, attempt: int = 1) -> Span:
    return Span(f"{1:032x}", f"{number:016x}", None, rollout_id, attempt, "chat m", 1.0, 2.0)


class LosesAnswers:
    """A proxy that passes a request on and, for the first `n` requests to a path, drops the answer."""

    def __init__(self, port: int, path: bytes, n: int) -> None:
        self.to, self.path, self.left = port, path, n

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: Any) -> None:
        self.server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, onward = await asyncio.open_connection("127.0.0.1", self.to)

        async def forward() -> None:
            while data := await reader.read(65536):
                self.seen += data
                onward.write(data)

        self.seen = b""
        task = asyncio.ensure_future(forward())
        while data := await behind.read(65536):
            if self.left and self.path in self.seen:
                self.left -= 1
                break
            self.seen = b""
            writer.write(data)
        task.cancel()
        writer.transport.abort()
        onward.close()


def test_an_answer_that_was_lost_is_asked_for_again_and_nothing_is_done_twice(tmp_path: Path) -> None:
    async def scenario(server: ServedStore) -> None:
        for path, n in ((b"/v1/store/batch", 2), (b"/v1/store/dequeue_rollout", 2)):
            proxy = LosesAnswers(server.port, path, 0)
            async with proxy as url:
                store = await open_store(url)
                run_id = f"run-{n}-{path.decode()}"
                proxy.left = n
                if path.endswith(b"batch"):
                    await store.enqueue_rollouts([NewRollout("a", run_id=run_id)])
                    proxy.left = n
                    resources_id = await store.update_resources({"x": 1})
                    assert await store.get_resources() == (resources_id, {"x": 1})
                    proxy.left = n
                    leased = await store.dequeue_rollout("w", run_id=run_id)
                else:
                    await store.enqueue_rollouts([NewRollout("a", run_id=run_id)])
                    leased = await store.dequeue_rollout("w", run_id=run_id, wait=5)
                assert proxy.left == 0
                assert leased is not None
                assert leased.attempt.attempt == 1
                (rollout,) = await store.query_rollouts(run_id=run_id)
                assert (rollout.status, rollout.attempts) == ("preparing", 1)
                assert await store.dequeue_rollout("w", run_id=run_id) is None
                await store.close()

    with served(tmp_path) as server:
        asyncio.run(scenario(server))


def test_a_repeated_request_gets_its_lease_after_the_server_was_restarted(tmp_path: Path) -> None:
    async def scenario(server: ServedStore) -> None:
        store = await open_store(server.url)
        await store.enqueue_rollouts([NewRollout("a"), NewRollout("b")])
        first = await store.dequeue_rollout("w", request_id="once")
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        again = await store.dequeue_rollout("w", request_id="once")
        assert first is not None
        assert again is not None
        assert again.rollout == first.rollout
        assert again.attempt.attempt == 1
        other = await store.dequeue_rollout("w", request_id="twice")
        assert other is not None
        assert other.rollout.task == "b"
        # Once it runs, the request is over: the same id leases anew, and finds nothing.
        await store.update_attempt(first.rollout.rollout_id, 1, "running")
        assert await store.dequeue_rollout("w", request_id="once") is None
        await store.close()

    with served(tmp_path) as server:
        asyncio.run(scenario(server))


def test_a_server_that_goes_and_comes_back_loses_nothing_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: ServedStore) -> None:
        store = await open_store(server.url)
        (rollout,) = await store.enqueue_rollouts([NewRollout("a")])
        waiting = asyncio.ensure_future(store.wait_for_rollouts([rollout.rollout_id], timeout=60))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.stop)
        writes = [asyncio.ensure_future(store.add_spans([span("r", n)])) for n in range(1, 51)]
        await asyncio.sleep(1.0)
        assert not any(write.done() for write in writes)
        await asyncio.to_thread(server.start)
        await asyncio.gather(*writes)
        assert len(await store.query_spans("r")) == 50
        await store.cancel_rollouts([rollout.rollout_id])
        assert [r.status for r in await waiting] == ["cancelled"]
        await store.close()

    with served(tmp_path) as server, caplog.at_level(logging.WARNING, "agl.store"):
        asyncio.run(scenario(server))
    told = [record.message for record in caplog.records if record.name == "agl.store"]
    assert len(told) == 2, told
    assert "does not answer" in told[0]
    assert "is back after" in told[1]


def test_a_server_that_stays_away_is_an_error_in_bounded_time(tmp_path: Path) -> None:
    async def scenario(server: ServedStore) -> None:
        store = await HttpStore.open(server.url, retry_seconds=0.5)
        await asyncio.to_thread(server.stop)
        with pytest.raises(StoreError, match=r"the store does not answer(.|\n)*is `agl store` running there"):
            await store.query_rollouts()
        # A second caller does not wait again for what is known to be gone.
        with pytest.raises(StoreError, match="does not answer"):
            await store.add_spans([span("r", 1)])
        await store.close()

    with served(tmp_path) as server:
        asyncio.run(scenario(server))


def test_many_loops_share_one_client(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        store = asyncio.run(open_store(server.url))

        async def work(k: int) -> None:
            await asyncio.gather(*(store.add_spans([span(f"r{k}", 100 * k + n)]) for n in range(1, 41)))

        threads = [threading.Thread(target=lambda k=k: asyncio.run(work(k))) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(asyncio.run(store.query_spans(f"r{k}"))) for k in range(4)] == [40] * 4
        asyncio.run(store.close())


def test_a_worker_that_waits_gets_work_when_it_comes_and_a_wait_that_was_cancelled_leaves_none(tmp_path: Path) -> None:
    async def scenario(server: ServedStore) -> None:
        store = await open_store(server.url)
        waiting = asyncio.ensure_future(store.dequeue_rollout("w", wait=20))
        gone = asyncio.ensure_future(store.dequeue_rollout("gone", wait=20))
        await asyncio.sleep(0.3)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await store.enqueue_rollouts([NewRollout("late")])
        leased = await asyncio.wait_for(waiting, 15)
        assert leased is not None
        assert leased.attempt.worker_id == "w"
        assert await store.dequeue_rollout(wait=0.2) is None
        await store.close()

    with served(tmp_path) as server:
        asyncio.run(scenario(server))


def test_every_method_of_the_store_is_there_and_takes_what_it_declares(tmp_path: Path) -> None:
    for name, method in protocol.METHODS.items():
        assert inspect.signature(getattr(HttpStore, name)) == inspect.signature(getattr(Store, name)), name
        assert inspect.iscoroutinefunction(getattr(HttpStore, name)), method

    async def scenario(server: ServedStore) -> None:
        store = await open_store(server.url)
        (a, b) = await store.enqueue_rollouts([NewRollout("a", step=1), NewRollout("b", step=2)])
        ids = {a.rollout_id: 0, b.rollout_id: 1}
        assert [r.task for r in await store.query_rollouts(status=("queuing",), step=2)] == ["b"]
        await store.cancel_rollouts(ids.keys())  # type: ignore[arg-type]
        assert await store.count_rollouts(status={"cancelled"}) == 2  # type: ignore[arg-type]
        assert await store.query_spans(a.rollout_id, 1) == await store.query_spans(a.rollout_id, attempt=1) == []
        with pytest.raises(TypeError, match="unexpected keyword argument 'tries'"):
            await store.query_spans(a.rollout_id, tries=1)  # type: ignore[call-arg]
        await store.close()

    with served(tmp_path) as server:
        asyncio.run(scenario(server))


def test_an_error_that_quotes_half_a_character_is_answered(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        answer = httpx.post(
            f"{server.url}/v1/store/get_rollout",
            content=b'{"rollout_id": "ro-\\ud800"}',
            headers={"content-type": "application/json"},
            trust_env=False,
        )
    assert answer.status_code == 409
    assert answer.json()["error"]["type"] in ("StoreError", "NotStoredError")


# -- keys -------------------------------------------------------------------------------------------------------------
def test_strangers_get_nothing_and_nothing_tells_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: ServedStore) -> None:
        for key in (None, "wrong-key-of-this-test", OPERATOR[:-1], OPERATOR + "x"):
            with pytest.raises(StoreError, match="does not know this key") as refused:
                await HttpStore.open(server.url, key=key)
            assert key is None or key not in str(refused.value)
        store = await HttpStore.open(server.url.replace("//", f"//:{OPERATOR}@"))
        await store.add_spans([span("r", 1)])
        assert OPERATOR not in store.url
        await store.close()
        headers = [("authorization", f"Bearer {OPERATOR}"), ("authorization", "Bearer other-key")]
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{server.url}/v1/store/about", headers=headers)).status_code == 401

    with caplog.at_level(logging.DEBUG), served(tmp_path, keys=KEYS) as server:
        asyncio.run(scenario(server))
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert OPERATOR.encode() not in stored
    assert OPERATOR not in repr(KEYS)
    assert OPERATOR not in caplog.text


def test_a_runner_runs_and_no_more(tmp_path: Path) -> None:
    async def scenario(server: ServedStore) -> None:
        operator = await HttpStore.open(server.url, key=OPERATOR)
        runner = await HttpStore.open(server.url, key=RUNNER)
        await operator.enqueue_rollouts([NewRollout("a", config=RolloutConfig(max_attempts=1))])
        leased = await runner.dequeue_rollout("w", wait=5)
        assert leased is not None
        rollout_id = leased.rollout.rollout_id
        await runner.heartbeat(rollout_id, 1)
        await runner.update_attempt(rollout_id, 1, "running")
        await runner.add_spans([span(rollout_id, 1)])
        for other in (span(rollout_id, 2, attempt=2), span("nobody", 3)):
            with pytest.raises(StoreError, match="good for its own leases"):
                await runner.add_spans([span(rollout_id, 4), other])
        for refused in (
            runner.enqueue_rollouts([NewRollout("mine")]),
            runner.query_rollouts(),
            runner.query_spans(rollout_id),
            runner.cancel_rollouts([rollout_id]),
            runner.update_resources({"x": 1}),
            runner.add_policy_version("run", "policy", 1, 1),
            runner.wait_for_rollouts([rollout_id], timeout=0),
        ):
            with pytest.raises(StoreError, match="a runner's key is not good for"):
                await refused
        await runner.update_attempt(rollout_id, 1, "succeeded")
        with pytest.raises(StoreError, match="has no such attempt open"):
            await runner.add_spans([span(rollout_id, 5)])
        assert [s.span_id for s in await operator.query_spans(rollout_id)] == [f"{1:016x}"]
        await operator.close()
        await runner.close()

    with served(tmp_path, keys=KEYS) as server:
        asyncio.run(scenario(server))


def test_another_address_needs_a_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await open_store("memory")
        for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
            with pytest.raises(ConfigError, match=r"without a key(.|\n)*AGL_OPERATOR_KEY"):
                StoreServer(store, host=host, port=0)
        server = StoreServer(store, host="0.0.0.0", port=0, keys=KEYS)
        assert (await server.start()).startswith("http://0.0.0.0:")
        await server.stop()
        await store.close()

    asyncio.run(scenario())


def test_keys_that_protect_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for operator, runner, what in (
        ("short", None, "5 characters"), (None, RUNNER, "no operator key"), (OPERATOR, OPERATOR, "is the operator key")
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=what):
            Keys.of(operator, runner)
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.find(file)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="0 lines"):
        Keys.find(file)
    file.write_text(f"{OPERATOR}\n{RUNNER}\n")
    assert Keys.find(file) == KEYS
    monkeypatch.setenv("AGL_OPERATOR_KEY", OPERATOR)
    monkeypatch.setenv("AGL_RUNNER_KEY", RUNNER)
    assert Keys.find() == KEYS


def test_a_web_page_on_this_machine_is_no_operator(tmp_path: Path) -> None:
    with served(tmp_path) as server, httpx.Client(trust_env=False, base_url=server.url) as client:
        path = "/v1/store/query_rollouts"
        assert client.post(path, json={}).status_code == 200
        assert client.post(path, json={}, headers={"origin": "http://evil.example"}).status_code == 401
        assert client.post(path, content="{}", headers={"content-type": "text/plain"}).status_code == 415


# -- the command ------------------------------------------------------------------------------------------------------
def test_the_command_serves_until_it_is_stopped_and_leaves_no_port(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    command = [
        sys.executable,
        "-c",
        "from agl.trainer.cli import main; main()",
        "store",
        "--port",
        "0",
        "--json",
        str(facts),
    ]
    command += ["--db", f"sqlite:///{tmp_path / 'a.db'}"]
    environment = {**os.environ, "AGL_OPERATOR_KEY": OPERATOR}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        url = json.loads(facts.read_text())["url"]
        assert f"listens {url}\n" in lines

        async def scenario() -> None:
            store = await HttpStore.open(url, key=OPERATOR)
            waiting = asyncio.ensure_future(store.dequeue_rollout(wait=60))
            await store.enqueue_rollouts([NewRollout("kept", run_id="other")])
            assert await waiting is not None
            waiting = asyncio.ensure_future(store.dequeue_rollout(wait=60))
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 10) == 0
            waiting.cancel()
            await asyncio.wait([waiting], timeout=15)

        asyncio.run(scenario())
        assert OPERATOR not in process.stdout.read() + "".join(lines) + facts.read_text()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0
    finally:
        process.kill()
        process.wait()
