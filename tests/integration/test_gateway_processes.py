"""A gateway in several processes: as one to agents, engines, the store and the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import scripted
from processes import gateway_processes
from running import say
from scripted import ScriptedEngine, ScriptedRollouts, in_loop, quick_tokenizer, rendering_of, serving
from tiny_run import TRAIN, train

import agl
from agl.errors import ConfigError, GatewayError
from agl.mdp.selection import select
from agl.trainer.algorithms.options import Settings
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.processes.group import GatewayProcesses
from agl.trainer.http.auth import Keys
from agl.trainer.http.limits import Limits
from agl.trainer.runners.remote.worker import run_worker
from agl.trainer.store import open_store
from agl.trainer.store.types import NewRollout
from agl_service import server
from agl_service.client import client_agent


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "GATEWAYS", 2)


@in_loop
async def test_each_attempt_has_its_process_and_all_share_engine_and_store():
    async with serving(["one", "two", "three", "four"]) as rig:
        attempts = [await rig.attempt(seed=n) for n in range(4)]
        ports = [attempt.access.port for attempt in attempts]
        assert len(set(ports)) == 2
        assert sorted(ports.count(port) for port in set(ports)) == [2, 2]
        first = attempts[0]
        answer = await first.chat("hello")
        history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one"}]
        await first.chat([*history, {"role": "user", "content": "again"}])
        stream = await attempts[1].chat("hello", stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert (answer.choices[0].message.content, text) == ("one", "three")
        one, two = await first.close()
        assert (two.parent_id, two.request["messages"]) == (one.id, [{"role": "user", "content": "again"}])
        assert two.prompt_ids.tolist()[: one.ids.size] == one.ids.tolist()
        assert (await attempts[1].close())[0].response_ids.size == len(rig.engine.encode("three")) + 1
        assert len(rig.engine.asked) == 3
        for attempt in attempts[:2]:
            with pytest.raises(openai.AuthenticationError):
                await attempt.chat("too late")
        # Its key is good for its own attempt alone.
        with pytest.raises(openai.AuthenticationError):
            await attempts[2].client(key=attempts[3].key).models.list()


@in_loop
async def test_limits_errors_and_cancelled_requests_are_those_of_one_process():
    engine = ScriptedEngine(quick_tokenizer(), ["held", "after the update"], paused=True)
    async with serving(engine, limits=Limits(requests_per_attempt=1), hold_timeout=0.2) as rig:
        attempt = await rig.attempt()
        asking = asyncio.ensure_future(attempt.chat("hello"))
        while not engine.running:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="1 requests running"):
            await attempt.chat("one more")
        async with rig.gateway.hold():
            with pytest.raises(openai.InternalServerError, match="being updated"):
                await asking
            assert (engine.running, engine.cancelled) == (0, 1)
            waiting = asyncio.ensure_future(attempt.chat("hello"))
            await asyncio.sleep(0.3)
            assert len(engine.asked) == 1, "requests are held"
            engine.resume.set()
        assert (await waiting).choices[0].message.content == "after the update"
        engine.resume.clear()
        asking = asyncio.ensure_future(attempt.chat("hello"))
        while not engine.running:
            await asyncio.sleep(0.01)
        calls = await attempt.close()
        assert [call.finish_reason for call in calls] == ["cancelled", "stop", "cancelled"]
        with pytest.raises(openai.APIStatusError):
            await asking
        with pytest.raises(openai.BadRequestError, match="context"):
            await (await rig.attempt()).chat("word " * 5000)


@in_loop
async def test_a_process_that_dies_is_named_and_the_others_go_on():
    failures: list[Any] = []
    async with serving(["fine"], on_failure=failures.append) as rig:
        lost, kept = await rig.attempt(), await rig.attempt()
        await lost.chat("recorded before")
        assert isinstance(rig.gateway, GatewayProcesses)
        first, second = rig.gateway.pids
        os.kill(first, signal.SIGKILL)
        with pytest.raises(openai.APIConnectionError):
            await lost.chat("hello")
        name = rf"gateway process 0 \(pid {first}\) died with exit code -9"
        with pytest.raises(GatewayError, match=name):
            await rig.gateway.close_attempt(lost.access.rollout_id, 1)
        assert len(await rig.store.query_calls(lost.access.rollout_id)) == 1
        assert (await kept.chat("hello")).choices[0].message.content == "fine"
        assert (await rig.attempt()).access.port == kept.access.port
        async with rig.gateway.hold():
            pass
        assert not failures
        os.kill(second, signal.SIGKILL)
        while not failures:
            await asyncio.sleep(0.01)
        with pytest.raises(GatewayError, match="gateway process 1"):
            await rig.attempt()


@in_loop
async def test_what_cannot_be_sent_to_another_process_is_refused():
    store = await open_store()
    rendering: Any = rendering_of(quick_tokenizer())
    broken: Any = type("Broken", (), {"stop_token_ids": (), "__reduce__": lambda self: 1 / 0})()
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        GatewayProcesses(store, 2).serve("policy", ScriptedEngine(quick_tokenizer(), ["x"]), broken)
    gateway = Gateway(store)
    gateway.serve("policy", ScriptedEngine(quick_tokenizer(), ["x"]), rendering)
    with pytest.raises(GatewayError, match="not listening"):
        gateway.open_attempt("a", 1, selection=select(None))
    await store.close()


LOADS = """
import pickle, sys
from agl.trainer.gateway.processes import worker
rendering = worker._unpickled(open("rendering", "rb").read())
assert rendering.prompt([{"role": "user", "content": "hello"}]).ids.size
assert "torch" not in sys.modules
assert worker._unpickled(b"cneeds_torch\\nversion\\n.") == sys.modules["torch"].__version__
"""


@pytest.mark.night
def test_a_process_loads_torch_only_for_a_tokenizer_that_needs_it(tmp_path: Path) -> None:
    (tmp_path / "rendering").write_bytes(pickle.dumps(rendering_of(quick_tokenizer())))
    (tmp_path / "needs_torch.py").write_text("import torch\nversion = torch.__version__\n")
    program = subprocess.run([sys.executable, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True)
    assert program.returncode == 0, program.stderr


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("runners", [pytest.param("local", marks=pytest.mark.night), "process"])
def test_a_run_trains_through_two_processes_and_leaves_none(
    tmp_path: Path, untrained_model: Path, runners: str
) -> None:
    result = train(untrained_model, tmp_path, steps=1, gateways=2, runners=runners)
    assert result.history[-1]["train/failed_rollouts"] == 0
    assert gateway_processes() == []


killed: list[int] = []


@agl.rollout
def kills_one(task: dict[str, str], llm: agl.LLM) -> float:
    """The first rollout kills a gateway process while others use it."""
    if not killed:
        killed.append(gateway_processes()[0])
        os.kill(killed[0], signal.SIGKILL)
    return len(say(llm, task["question"])) % 5 / 4


@pytest.mark.slow
def test_the_attempts_of_a_process_that_died_are_tried_again(tmp_path: Path, untrained_model: Path) -> None:
    algorithm = agl.GRPO(
        model=str(untrained_model), group_size=4, batch_size=2, steps=1, max_response_tokens=6, max_context=128
    )
    trainer = agl.Trainer(algorithm, n_workers=8, directory=tmp_path, progress=False, gateways=2)
    result = trainer.fit(kills_one, TRAIN)
    assert result.history[-1]["train/failed_rollouts"] == 0

    async def errors() -> list[str]:
        store = await open_store(result.store)
        rollouts = await store.query_rollouts()
        attempts = [a for r in rollouts for a in await store.query_attempts(r.rollout_id)]
        await store.close()
        return [attempt.error for attempt in attempts if attempt.error is not None]

    named = [error for error in asyncio.run(errors()) if f"(pid {killed[0]}) died" in error]
    assert named
    assert len(named) <= 4


@pytest.mark.parametrize(("options", "processes"), [({}, 2), ({"gateways": 1}, 0), ({"agents": lambda name: True}, 0)])
@pytest.mark.night
def test_the_algorithms_number_counts_where_it_can(tmp_path: Path, options: dict[str, Any], processes: int) -> None:
    alive: set[int] = set()

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        alive.add(len(gateway_processes()))
        return float(len(say(llm, task)))

    algorithm = ScriptedRollouts(["fine"] * 2, gateways=2)
    agl.Trainer(algorithm, directory=tmp_path, progress=False, **options).fit(agent, ["a", "b"])
    assert alive == {processes}


def test_a_selection_by_a_function_and_two_processes_are_refused(tmp_path: Path) -> None:
    trainer = agl.Trainer(
        ScriptedRollouts(["x"]), directory=tmp_path, progress=False, gateways=2, agents=lambda c: True
    )
    with pytest.raises(ConfigError, match="function"):
        trainer.fit(agl.rollout(lambda task, llm: 1.0), ["a"])


def free_ports_in_a_row(n: int) -> int:
    """The first of them."""
    while True:
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for i in range(1, n):
                stack.enter_context(socket.create_server(("127.0.0.1", first + i)))
            return first


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param(None, marks=pytest.mark.night)])
@in_loop
async def test_a_server_answers_on_the_ports_after_its_own(
    algorithm: str | None, untrained_model: Path, tmp_path: Path
) -> None:
    port = free_ports_in_a_row(3)
    values = {"model": str(untrained_model), "algorithm": algorithm, "gpus": 0, "threads": 1}
    values["directory"] = str(tmp_path)
    training = {"steps": 1, "group_size": 4, "batch_size": 2, "max_response_tokens": 6, "max_context": 128}
    values |= {"port": port, "gateways": 2, **(training if algorithm else {})}
    ports: set[int | None] = set()

    def agent(resource: Any, task: Any) -> float:
        ports.add(urlsplit(resource.model_api).port)
        client = openai.OpenAI(base_url=resource.model_api, api_key="not-used", max_retries=0)
        message: Any = {"role": "user", "content": task.question}
        answer = client.chat.completions.create(model="m", messages=[message], max_completion_tokens=6)
        return len(answer.choices[0].message.content or "") % 5 / 4

    async with server.serving(Settings.of(values, "test"), Keys(), progress=False) as service:
        url = service.mount.url
        if algorithm:
            client = agl.Client(url, progress=False)
            await asyncio.to_thread(client.upload_data, TRAIN)
            result = await asyncio.to_thread(client.train, agent, 4)
            assert result.history[-1]["train/failed_rollouts"] == 0
        else:
            assert len(gateway_processes()) == 2
            tasks = [NewRollout(task=task) for task in TRAIN[:4]]
            ids = [rollout.rollout_id for rollout in await service.store.enqueue_rollouts(tasks)]
            over = asyncio.Event()
            working = asyncio.ensure_future(run_worker(client_agent(agent), url, n_workers=4, until=over))
            rollouts = await service.store.wait_for_rollouts(ids)
            over.set()
            await working
            assert {rollout.status for rollout in rollouts} == {"succeeded"}
            assert all([await service.store.query_calls(rollout_id) for rollout_id in ids])
    assert ports == {port + 1, port + 2}
    assert gateway_processes() == []
