"""A malicious agent: it holds its own attempt's key, knows every URL, and gets nothing but its own model's answers.

Each attack is tried for real against a listening gateway and a listening store over the same database. It has succeeded
if an answer lets it in, or if afterwards anything that is not its own calls differs from before.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from scripted import Attempt, Rig, ScriptedEngine, in_loop, quick_tokenizer, serving, until
from store_server import KEYS

from agl import semconv
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.tracing import otlp
from agl.trainer.http.limits import Limits
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.remote.coordinator import coordinator_routes, key_check
from agl.trainer.store.http.server import StoreServer
from agl.trainer.store.types import NewRollout

USER = {"role": "user", "content": "hi"}
LIMITS = Limits(body_bytes=100_000, header_seconds=3.0, body_seconds=3.0, body_rate=100_000, requests_per_attempt=4)


@dataclass
class World:
    """What the agent faces.

    Attributes:
        mine: its attempt, whose URL and key it has. victim: another, whose URL it has guessed. store_url: of the store.
        queued: a rollout that waits for a runner.
    """

    rig: Rig
    mine: Attempt
    victim: Attempt
    store_url: str
    queued: str
    http: httpx.AsyncClient

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.mine.key}", "content-type": "application/json"}

    async def method(self, name: str, **arguments: Any) -> httpx.Response:
        """Ask the store for something."""
        return await self.http.post(f"{self.store_url}/v1/store/{name}", json=arguments, headers=self.headers)

    async def chat(self, url: str, body: Any = None, **headers: str) -> httpx.Response:
        body = {"messages": [USER]} if body is None else body
        return await self.http.post(f"{url}/chat/completions", json=body, headers={**self.headers, **headers})

    async def facts(self) -> Any:
        """Everything that the agent must not change."""
        store, mine = self.rig.store, self.mine.access.rollout_id
        rollouts = await store.query_rollouts()
        return (
            rollouts,
            [await store.query_attempts(r.rollout_id) for r in rollouts],
            [await store.query_spans(r.rollout_id) for r in rollouts],
            [[c.id for c in await store.query_calls(r.rollout_id)] for r in rollouts if r.rollout_id != mine],
            await store.get_resources(),
            self.rig.gateway.models,
        )


Attack = Callable[[World], Awaitable[list[httpx.Response]]]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    """One that must be refused: every answer it gets back is an error."""
    ATTACKS[function.__name__] = function
    return function


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    engine = ScriptedEngine(quick_tokenizer(), ["x"])
    async with serving(engine, limits=LIMITS) as rig:
        mine, victim = await rig.attempt(), await rig.attempt()
        await victim.chat()
        await rig.store.update_resources({"prompt": "the real one"})
        await rig.store.add_spans([Span("1" * 32, "2" * 16, None, victim.access.rollout_id, 1, "secret", 1.0, 2.0)])
        (queued,) = await rig.store.enqueue_rollouts([NewRollout("secret task")])
        coordinator = RunCoordinator(rig.store, rig.gateway, selection=select(None))
        routes = coordinator_routes(lambda: coordinator, key_check(KEYS))
        server = StoreServer(rig.store, port=0, keys=KEYS, limits=LIMITS, extra_routes=routes)
        url = await server.start()
        async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
            yield World(rig, mine, victim, url, queued.rollout_id, http)
        await server.stop()


def reward(rollout_id: str) -> Span:
    facts = {
        semconv.OPERATION_NAME: semconv.REWARD, semconv.REWARD_NAME: "reward", semconv.REWARD_VALUE: 1e6,
        semconv.REWARD_PRIMARY: True, semconv.ROLLOUT_ID: rollout_id, semconv.ATTEMPT: 1,
    }  # fmt: skip
    return Span("3" * 32, "4" * 16, None, rollout_id, 1, "reward", 1.0, 2.0, attributes=facts)


# -- the store --------------------------------------------------------------------------------------------------------
@attack
async def reads_other_rollouts(world: World) -> list[httpx.Response]:
    id = world.victim.access.rollout_id
    names = ("get_rollout", "query_spans", "query_calls", "query_attempts", "query_trained_calls")
    return [await world.method(name, rollout_id=id) for name in names]


@attack
async def lists_rollouts(world: World) -> list[httpx.Response]:
    about = await world.http.get(f"{world.store_url}/v1/store/about", headers=world.headers)
    return [await world.method("query_rollouts"), await world.method("get_resources"), about]


@attack
async def posts_reward_spans(world: World) -> list[httpx.Response]:
    mine = reward(world.mine.access.rollout_id)
    answers = []
    for base in (world.store_url, world.mine.rig.gateway.base_url, world.mine.access.url):
        request = otlp.encode([mine])
        answers.append(await world.http.post(f"{base}/v1/traces", json=request, headers=world.headers))
    body = {"rollout_id": mine.rollout_id, "attempt": 1, "trace_id": "3" * 32, "span_id": "4" * 16, "parent_id": None,
            "name": "reward", "start": 1.0, "end": 2.0, "attributes": dict(mine.attributes)}  # fmt: skip
    return [*answers, await world.method("add_spans", spans=[body])]


@attack
async def moves_its_attempts_status(world: World) -> list[httpx.Response]:
    id = world.mine.access.rollout_id
    return [
        await world.method("update_attempt", rollout_id=id, attempt=1, status="succeeded"),
        await world.method("cancel_rollouts", rollout_ids=[world.victim.access.rollout_id]),
        await world.method("expire_attempts", now=time.time() + 1e6),
    ]


@attack
async def keeps_others_alive(world: World) -> list[httpx.Response]:
    return [await world.method("heartbeat", rollout_id=world.victim.access.rollout_id, attempt=1)]


@attack
async def takes_and_makes_work(world: World) -> list[httpx.Response]:
    return [
        await world.method("dequeue_rollout", worker_id="evil"),
        await world.method("enqueue_rollouts", rollouts=[{"task": "mine"}]),
        await world.method("give_back", request_id="x"),
    ]


@attack
async def changes_the_resources(world: World) -> list[httpx.Response]:
    return [
        await world.method("update_resources", resources={"prompt": "evil"}),
        await world.method("add_policy_version", run_id="r", policy="policy", version=9, step=9, checkpoint="/evil"),
        await world.method("add_trained_calls", run_id="r", rows=[]),
    ]


@attack
async def fakes_a_model_call(world: World) -> list[httpx.Response]:
    def packed(values: Any) -> str:
        return base64.b64encode(np.asarray(values).tobytes()).decode()

    call = {
        "id": "fake", "rollout_id": world.mine.access.rollout_id, "attempt": 1, "index": 0, "agent": "agent",
        "policy": "policy", "policy_version": 0, "prompt_ids": packed(np.int32([1])),
        "response_ids": packed(np.int32([2])), "logprobs": packed(np.float32([0.0])),
    }  # fmt: skip
    return [await world.method("add_calls", calls=[call])]


@attack
async def plays_a_runner(world: World) -> list[httpx.Response]:
    """Its own good report would be a reward of its own making."""
    id = world.mine.access.rollout_id
    lease, spans = {"rollout_id": id, "attempt": 1}, orjson.loads(orjson.dumps([reward(id)]))
    bodies = {"lease": {"worker_id": "w", "request_id": "r", "wait": 0}, "forget": {"request_id": "r"},
              "heartbeat": {"lease": lease}, "deliver": {"lease": lease, "spans": spans},
              "finish": {"lease": lease, "report": {"spans": spans}},
              "abandon": {"lease": lease, "why": "x"}}  # fmt: skip
    servers = (world.store_url, world.rig.gateway.base_url)
    asked = [(f"{server}/runner/{what}", body) for server in servers for what, body in bodies.items()]
    return [await world.http.post(url, json=body, headers=world.headers) for url, body in asked]


@attack
async def hides_in_a_batch(world: World) -> list[httpx.Response]:
    operations = [{"method": "query_rollouts", "arguments": {}}, {"method": "dequeue_rollout", "arguments": {}}]
    return [await world.method("batch", operations=operations)]


# -- other attempts ---------------------------------------------------------------------------------------------------
@attack
async def uses_its_key_after_the_end(world: World) -> list[httpx.Response]:
    url = world.mine.url()
    await world.rig.gateway.close_attempt(world.mine.access.rollout_id, 1)
    models = await world.http.get(f"{url}/models", headers=world.headers)
    return [await world.chat(url), models]


@attack
async def uses_another_attempts_url(world: World) -> list[httpx.Response]:
    second = world.mine.url().replace("/attempts/1/", "/attempts/2/")
    negative = world.mine.url().replace("/attempts/1/", "/attempts/-1/")
    return [await world.chat(url) for url in (world.victim.url(), second, negative)]


@attack
async def tricks_with_paths(world: World) -> list[httpx.Response]:
    """Whatever the path, the attempt that it names is the one whose key is asked for."""
    gateway = world.rig.gateway.base_url.removeprefix("http://")
    victim, mine = world.victim.access.rollout_id, world.mine.access.rollout_id
    answers = []
    for path in (
        f"/rollouts/{mine}/attempts/1/../../{victim}/attempts/1/agents/agent/v1/chat/completions",
        f"/rollouts/{mine}%2f..%2f{victim}/attempts/1/agents/agent/v1/chat/completions",
        f"/rollouts/{mine}/attempts/1%2f..%2f..%2f{victim}/attempts/1/agents/agent/v1/chat/completions",
        f"//rollouts/{victim}/attempts/1/agents/agent/v1/chat/completions",
        f"/rollouts/{victim}/attempts/01/agents/agent/v1/chat/completions",
        f"/rollouts/{victim}%00/attempts/1/agents/agent/v1/chat/completions",
        f"http://evil/rollouts/{victim}/attempts/1/agents/agent/v1/chat/completions",
    ):
        reader, writer = await asyncio.open_connection(*gateway.split(":"))
        body = b'{"messages":[{"role":"user","content":"hi"}]}'
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {world.mine.key}\r\n"
            f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        status = int((await reader.readline()).split()[1])
        writer.close()
        answers.append(httpx.Response(status))
    return answers


@attack
async def tricks_with_headers(world: World) -> list[httpx.Response]:
    url = f"{world.victim.url()}/chat/completions"
    tricks: list[list[tuple[str, str]]] = [
        [("x-forwarded-for", "127.0.0.1"), ("x-forwarded-host", "localhost"), ("x-real-ip", "127.0.0.1")],
        [("x-original-url", world.mine.url()), ("x-rewrite-url", world.mine.url())],
        [("authorization", "Bearer y"), ("authorization", "Bearer x")],
        [("x-api-key", ""), ("x-api-key", world.mine.key)],
        [("x-http-method-override", "GET")],
    ]
    key = ("authorization", f"Bearer {world.mine.key}")
    return [await world.http.post(url, json={"messages": [USER]}, headers=[key, *trick]) for trick in tricks]


@attack
async def pauses_or_replaces_the_policy(world: World) -> list[httpx.Response]:
    answers = []
    for base in (world.rig.gateway.base_url, world.mine.url(), world.store_url):
        for path in (
            "pause",
            "hold",
            "policies/policy",
            "models/policy",
            "load_lora_adapter",
            "update_weights",
            "admin",
        ):
            answers.append(await world.http.post(f"{base}/{path}", json={"path": "/evil"}, headers=world.headers))
            answers.append(await world.http.put(f"{base}/{path}", json={"path": "/evil"}, headers=world.headers))
    return answers


# -- too much of everything -------------------------------------------------------------------------------------------
@attack
async def sends_huge_bodies(world: World) -> list[httpx.Response]:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    whole = {"messages": [{**USER, "content": "x" * 200_000}]}
    url = f"{world.mine.url()}/chat/completions"
    return [
        await world.chat(world.mine.url(), whole),
        await world.http.post(url, content=endless(), headers=world.headers),
    ]


@attack
async def sends_deep_json(world: World) -> list[httpx.Response]:
    answers = []
    for depth in (300, 5000, 40_000):
        deep = b'{"messages":[{"role":"user","content":' + b"[" * depth + b"]" * depth + b"}]}"
        for url in (f"{world.mine.url()}/chat/completions", f"{world.store_url}/v1/traces"):
            answers.append(await world.http.post(url, content=deep, headers=world.headers))
    return answers


@attack
async def asks_for_a_million_answers(world: World) -> list[httpx.Response]:
    return [
        await world.chat(world.mine.url(), {"messages": [USER], **extra})
        for extra in ({"n": 10**6}, {"n": 2**70}, {"max_tokens": -1}, {"top_logprobs": 10**9, "logprobs": True})
    ]


@pytest.mark.parametrize("name", ATTACKS)
@in_loop
async def test_what_is_refused_changes_nothing(name: str):
    async with world() as faced:
        before, asked = await faced.facts(), len(faced.rig.engine.asked)
        answers = await ATTACKS[name](faced)
        assert answers
        assert [a.status_code for a in answers if not 400 <= a.status_code < 500] == []
        assert not any(b"secret" in a.content for a in answers)
        assert await faced.facts() == before
        assert len(faced.rig.engine.asked) == asked
        # Nobody else has noticed.
        assert (await faced.victim.chat()).choices


# -- what is answered, and is still no success ------------------------------------------------------------------------
@in_loop
async def test_a_traceparent_of_another_rollout_leads_nowhere():
    async with world() as faced:
        before = await faced.facts()
        answer = await faced.chat(faced.mine.url(), traceparent=f"00-{'1' * 32}-{'2' * 16}-01")
        assert answer.status_code == 200
        assert await faced.facts() == before
        (call,) = await faced.mine.close()
        assert (call.rollout_id, call.agent) == (faced.mine.access.rollout_id, "agent")


@in_loop
async def test_a_models_name_chooses_no_policy_and_max_tokens_no_length():
    async with world() as faced:
        other = ScriptedEngine(quick_tokenizer(), ["stolen"])
        faced.rig.gateway.serve("other", other, faced.rig.gateway.served("policy").rendering)
        answer = await faced.chat(faced.mine.url(), {"model": "other", "messages": [USER], "max_tokens": 10**9})
        assert answer.json()["choices"][0]["message"]["content"] == "x"
        assert faced.rig.engine.asked[-1].sampling.max_tokens <= faced.rig.engine.max_context
        (call,) = await faced.mine.close()
        assert call.policy == "policy"


@in_loop
async def test_many_streams_of_one_attempt_leave_room_for_the_others():
    async with world() as faced:
        faced.rig.engine.resume.clear()
        body = {"messages": [USER], "stream": True}
        streams = [asyncio.ensure_future(faced.chat(faced.mine.url(), body)) for _ in range(40)]
        await until(lambda: sum(task.done() for task in streams) >= 40 - LIMITS.requests_per_attempt, 60)
        done, running = await asyncio.wait(streams, timeout=0)
        assert {task.result().status_code for task in done} == {429}
        assert faced.rig.engine.running <= LIMITS.requests_per_attempt
        victim = asyncio.ensure_future(faced.victim.chat())
        await asyncio.sleep(0.2)
        faced.rig.engine.resume.set()
        assert (await victim).choices
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}


@pytest.mark.full
@in_loop
async def test_a_slow_loris_holds_nothing():
    async with world() as faced:
        host, port = faced.rig.gateway.base_url.removeprefix("http://").split(":")
        path = faced.mine.url().partition(f":{port}")[2]
        head = (
            f"POST {path}/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {faced.mine.key}\r\n"
        )
        held = [await asyncio.open_connection(host, port) for _ in range(100)]
        for i, (_, writer) in enumerate(held):
            writer.write(head.encode() + (b"content-length: 1000\r\n\r\n{" if i % 2 else b"x-slow: "))
        assert (await faced.victim.chat()).choices
        async with asyncio.timeout(60):
            for reader, _ in held:
                assert (await reader.read(12)) in (b"HTTP/1.1 408", b"HTTP/1.1 429")
        assert (await faced.victim.chat()).choices
