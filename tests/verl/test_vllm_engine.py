"""`agl.VLLMEngine` against a real `vllm serve`: the engines' suite, and what is vLLM's own."""

from __future__ import annotations

import asyncio
import importlib.util
import time

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from engine_suite import CONTEXT, EngineSuite, suite_model, write_suite_model
from tiny_engine import prompts, reference
from vllm_server import VLLMServer

import agl
from agl.errors import ConfigError, EngineError
from agl.trainer.engines.base import Request, Sampling

KEY = "a-key-for-this-test"


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two: one that reports log-probs of what it draws from, and one as `vllm serve` is by default, with a key."""
    here = tmp_path_factory.mktemp("vllm")
    model = write_suite_model(here / "model")
    length = ("--max-model-len", CONTEXT)
    started = [
        VLLMServer(model, here / "processed.log", *length, "--logprobs-mode", "processed_logprobs"),
        VLLMServer(model, here / "raw.log", *length, "--served-model-name", "tiny", api_key=KEY),
    ]
    try:
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.stop()


@pytest.fixture(scope="module")
def engine(servers, runner):
    engine = agl.VLLMEngine(servers[0].url)
    runner.run(engine.connect())
    yield engine
    runner.run(engine.close())


class TestVLLM(EngineSuite):
    """The suite."""


def test_it_knows_the_server(engine, servers):
    assert engine.model == engine.root
    assert engine.model.endswith("/model")
    assert engine.url == servers[0].url


@pytest.mark.parametrize("streamed", [False, True])
def test_a_cancelled_call_ends_on_the_server(engine, servers, runner, streamed):
    n = 192

    def completed() -> float:
        return servers[0].metric("vllm:request_success_total", 'finished_reason="length"')

    def on_server() -> float:
        return sum(servers[0].metric(f"vllm:num_requests_{state}") for state in ("running", "waiting"))

    async def scenario():
        # Three times as many as it runs at once.
        on_tokens = (lambda ids, logprobs: None) if streamed else None
        calls = [
            asyncio.ensure_future(
                engine.generate(Request(np.int32([1, 2]), Sampling(max_tokens=CONTEXT, seed=i)), on_tokens=on_tokens)
            )
            for i in range(n)
        ]
        while not await asyncio.to_thread(on_server):
            assert not all(call.done() for call in calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        deadline = time.monotonic() + 120
        # Twice, since a request may be on its way.
        while await asyncio.to_thread(on_server) or await asyncio.to_thread(on_server):
            assert time.monotonic() < deadline

    before = completed()
    runner.run(scenario())
    assert completed() - before < n
    assert runner.run(engine.generate(Request(np.int32([1]), Sampling(max_tokens=3)))).token_ids.size == 3


def test_a_server_that_reports_the_models_own_logprobs_samples_nothing_else(servers, runner):
    async def scenario():
        async with agl.VLLMEngine(f"{servers[1].url}/v1/", api_key=KEY) as engine:
            assert (engine.model, engine.max_context) == ("tiny", CONTEXT)
            for sampling in (Sampling(max_tokens=9, seed=1), Sampling(max_tokens=9, temperature=0.0, top_k=3)):
                answer = await engine.generate(Request(prompts(1)[0], sampling))
                expected = reference(suite_model(), prompts(1)[0], answer, sampling)
                np.testing.assert_allclose(answer.logprobs, expected, atol=2e-4)
            for changes in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}):
                with pytest.raises(ConfigError, match="processed_logprobs"):
                    await engine.generate(Request(prompts(1)[0], Sampling(max_tokens=9, **changes)))

    runner.run(scenario())


def test_what_is_wrong_with_the_address_is_said(servers, runner):
    def fails(engine: agl.VLLMEngine, error: type[Exception], message: str) -> None:
        async def scenario():
            try:
                await engine.generate(Request(np.int32([1]), Sampling(max_tokens=1)))
            finally:
                await engine.close()

        with pytest.raises(error, match=message) as raised:
            runner.run(scenario())
        assert KEY not in str(raised.value)

    raw = servers[1].url
    fails(agl.VLLMEngine(raw), ConfigError, r"(?s)refuses \(401\).*VLLM_API_KEY")
    fails(agl.VLLMEngine(raw, api_key="wrong"), ConfigError, "401")
    fails(agl.VLLMEngine(raw, "tyni", api_key=KEY), ConfigError, "did you mean 'tiny'")
    fails(agl.VLLMEngine("http://127.0.0.1:9"), EngineError, r"(?s)cannot be reached.*vllm serve")
    fails(agl.VLLMEngine(raw, api_key=KEY, timeout=0.001), EngineError, "silent for 0.001 s")
    for url in ("gpu:8000", "ftp://gpu"):
        with pytest.raises(ConfigError, match="http://gpu:8000"):
            agl.VLLMEngine(url)


def test_what_the_server_refuses_is_said(engine, runner):
    async def one(**changes):
        await engine.generate(Request(np.int32([1]), Sampling(max_tokens=1, **changes)))

    with pytest.raises(ConfigError, match="temperature must be in"):
        runner.run(one(temperature=3.0))
    with pytest.raises(ConfigError, match="max allowed: 20"):
        runner.run(one(top_logprobs=30))


def test_the_version_is_what_it_is_told(engine, runner):
    async def scenario():
        versions = [(await engine.generate(Request(np.int32([1]), Sampling(max_tokens=1)))).policy_version]
        engine.version = 7
        versions.append((await engine.generate(Request(np.int32([1]), Sampling(max_tokens=1)))).policy_version)
        engine.version = 0
        return versions

    assert runner.run(scenario()) == [0, 7]


def test_another_event_loop_takes_connections_of_its_own(servers):
    engine = agl.VLLMEngine(servers[0].url)

    async def once():
        try:
            return (await engine.generate(Request(np.int32([1, 2]), Sampling(max_tokens=4, seed=1)))).token_ids.tolist()
        finally:
            await engine.close()

    assert asyncio.run(once()) == asyncio.run(once())
