"""The life of a request: cancelled, held, too late, at once with others; and the server that it comes to."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from scripted import ScriptedEngine, in_loop, quick_tokenizer, serving, until

from agl.errors import GatewayError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer

USER = {"role": "user", "content": "hi"}

# -- the life of a request --------------------------------------------------------------------------------------------


@in_loop
async def test_closing_an_attempt_cancels_and_records_what_runs():
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], paused=True)) as rig:
        attempt = await rig.attempt()
        waiting = asyncio.ensure_future(attempt.chat(n=2))
        await until(lambda: rig.engine.running == 2)
        calls = await attempt.close()
        assert [c.finish_reason for c in calls] == ["cancelled", "cancelled"]
        assert all("attempt has ended" in c.error and c.prompt_ids.size for c in calls)
        assert rig.engine.running == 0
        with pytest.raises(openai.APIStatusError, match="attempt has ended") as closed:
            await waiting
        assert closed.value.status_code == 499


@in_loop
async def test_an_attempt_that_wants_many_answers_has_64_sampled_at_a_time_and_holds_nobody_up():
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"] * 101, paused=True)) as rig:
        greedy, modest = await rig.attempt(), await rig.attempt()
        many = asyncio.ensure_future(greedy.chat(n=100))
        await until(lambda: rig.engine.running == 64)
        one = asyncio.ensure_future(modest.chat())
        await until(lambda: rig.engine.running == 65)
        await asyncio.sleep(0.05)
        assert rig.engine.running == 65
        rig.engine.resume.set()
        assert len((await many).choices) == 100
        assert len((await one).choices) == 1
        assert len(await greedy.close()) == 100


@in_loop
async def test_a_request_whose_body_comes_too_late_is_recorded_at_the_close():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        path = attempt.url().partition(str(rig.server.port))[2]
        body = json.dumps({"messages": [USER]}).encode()
        writer.write(
            f"POST {path}/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {attempt.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        )
        await until(lambda: attempt.access.pending)
        (call,) = await attempt.close()
        assert (call.finish_reason, call.response_ids.size) == ("cancelled", 0)
        writer.write(body)
        assert b" 401 " in await reader.readline()
        writer.close()
    assert rig.engine.asked == []


@in_loop
async def test_a_client_that_hangs_up_cancels_its_request():
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], paused=True)) as rig:
        attempt = await rig.attempt()
        asking = asyncio.ensure_future(attempt.chat())
        await until(lambda: rig.engine.running == 1)
        asking.cancel()
        await until(lambda: rig.engine.cancelled == 1)
        await until(lambda: not attempt.access.pending)
        (call,) = await attempt.close()
    assert (call.finish_reason, call.error) == ("cancelled", "cancelled by the client")


@in_loop
async def test_an_update_waits_for_running_requests_and_holds_new_ones():
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], paused=True)) as rig:
        attempt = await rig.attempt()
        before = asyncio.ensure_future(attempt.chat("before"))
        await until(lambda: rig.engine.running == 1)
        updating = asyncio.Event()
        done = asyncio.Event()

        async def update() -> None:
            async with rig.gateway.hold():
                assert rig.engine.running == 0
                rig.engine.version += 1
                updating.set()
                await done.wait()
                assert rig.engine.running == 0

        task = asyncio.ensure_future(update())
        await asyncio.sleep(0.05)
        during = [asyncio.ensure_future(attempt.chat(f"during {i}")) for i in range(5)]
        await until(lambda: len(attempt.access.pending) == 6)
        assert not updating.is_set()
        rig.engine.resume.set()
        assert (await before).choices[0].message.content == "x"
        await updating.wait()
        assert len(rig.engine.asked) == 1
        done.set()
        await task
        await asyncio.gather(*during)
        assert sorted(c.policy_version for c in await attempt.close()) == [0, 1, 1, 1, 1, 1]


@in_loop
async def test_two_updates_in_a_row_let_nothing_through_between_them():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        async with rig.gateway.hold():
            waiting = asyncio.ensure_future(attempt.chat())
            await until(lambda: attempt.access.pending)
            await asyncio.sleep(0.05)
        async with rig.gateway.hold():
            await asyncio.sleep(0.05)
            assert rig.engine.asked == []
        await waiting


@in_loop
async def test_a_request_that_outlasts_the_wait_is_cancelled_and_tried_again_by_the_client():
    engine = ScriptedEngine(quick_tokenizer(), ["x"], paused=True)
    async with serving(engine, hold_timeout=0.1) as rig:
        attempt = await rig.attempt()
        client = attempt.client(max_retries=2)
        waiting = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[USER]))
        await until(lambda: engine.running == 1)
        async with rig.gateway.hold():
            assert engine.running == 0
            engine.resume.set()
        assert (await waiting).choices[0].message.content == "x"
        cancelled, answered = await attempt.close()
    assert (cancelled.finish_reason, answered.finish_reason) == ("cancelled", "stop")
    assert "being updated" in cancelled.error


@in_loop
async def test_an_engine_that_cannot_be_cancelled_does_not_hang_the_update(monkeypatch):
    monkeypatch.setattr("agl.trainer.gateway.gate.CANCEL_SECONDS", 0.1)
    release = asyncio.Event()

    class Stubborn(ScriptedEngine):
        async def generate(self, *args, **kwargs):
            self.running += 1
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return await super().generate(*args, **kwargs)

    async with serving(Stubborn(quick_tokenizer(), ["x"]), hold_timeout=0.1) as rig:
        attempt = await rig.attempt()
        waiting = asyncio.ensure_future(attempt.chat())
        await until(lambda: rig.engine.running)
        with pytest.raises(GatewayError, match="neither ended nor could be cancelled"):
            async with rig.gateway.hold():
                pass
        release.set()
        assert (await waiting).choices[0].message.content == "x"


@in_loop
async def test_many_requests_at_once_are_answered_and_recorded_once_each():
    async with serving(lambda asked: quick_tokenizer().decode(asked.prompt_ids).split("\n")[1][:4]) as rig:
        attempts = [await rig.attempt(seed=i) for i in range(8)]
        answers = await asyncio.gather(*(a.chat(f"{i:04d}{k}") for i, a in enumerate(attempts) for k in range(16)))
        calls = [await a.close() for a in attempts]
    assert [a.choices[0].message.content for a in answers] == [f"{i:04d}" for i in range(8) for _ in range(16)]
    for made in calls:
        assert sorted(c.index for c in made) == list(range(16))
    assert rig.engine.peak > 1


@in_loop
async def test_the_clients_span_is_recorded():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
        await attempt.chat(extra_headers={"traceparent": parent})
        await attempt.chat(extra_headers={"traceparent": "nonsense"})
        first, second = await attempt.close()
    assert (first.span_id, second.span_id) == ("cd" * 8, None)


# -- the server -------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_port_in_use_says_so():
    async with serving(["x"]) as rig:
        with pytest.raises(GatewayError, match=f"cannot listen on 127.0.0.1:{rig.server.port}.*\n.*0 for any free one"):
            await GatewayServer(Gateway(rig.store), port=rig.server.port).start()


@in_loop
async def test_an_attempt_needs_a_gateway_that_listens():
    async with serving(["x"]) as rig:
        await rig.server.stop()
        with pytest.raises(GatewayError, match="not listening"):
            await rig.attempt()


@in_loop
async def test_stopping_the_server_ends_open_requests(monkeypatch):
    monkeypatch.setattr("agl.trainer.http.server.STOP_SECONDS", 0.2)
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], paused=True)) as rig:
        attempt = await rig.attempt()
        waiting = asyncio.ensure_future(attempt.chat())
        await until(lambda: rig.engine.running == 1)
        await rig.server.stop()
        with pytest.raises(openai.InternalServerError, match="the gateway is stopping"):
            await waiting
        assert rig.engine.running == 0
        (call,) = await attempt.close()
    assert call.finish_reason == "cancelled"
