"""0.3's `LLMProxy`, execution strategies, component specifications and command lines under `agl.compat`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError
from scripted import in_loop

import agl.compat as al
from agl.errors import ConfigError
from agl.testing.provider import Provider, says, serve


def model(provider: Provider, name: str = "small") -> dict[str, Any]:
    params = {"model": "hosted_vllm/org/tiny", "api_base": provider.url, "api_key": "sk-its-own"}
    return {"model_name": name, "litellm_params": params}


@in_loop
async def test_calls_through_the_proxy_are_spans_of_their_attempt() -> None:
    with serve(says("blue")) as provider:
        store = al.InMemoryLightningStore()
        proxy = al.LLMProxy(model_list=[model(provider)], store=store)
        with pytest.raises(ConfigError, match="has not been started"):
            _ = proxy.endpoint
        await proxy.start()
        await store.add_resources({"llm": proxy.as_resource(sampling_parameters={"temperature": 0.5})})

        @al.rollout
        async def solve(task: str, llm: al.LLM) -> float:
            client = AsyncOpenAI(base_url=f"{llm.endpoint}/v1", api_key="anything", max_retries=0)
            messages: Any = [{"role": "user", "content": task}]
            answer = await client.chat.completions.create(model=llm.model, messages=messages)
            async for _ in await client.chat.completions.create(model=llm.model, messages=messages, stream=True):
                pass
            with pytest.raises(NotFoundError, match="has no model 'other'"):
                await client.chat.completions.create(model="other", messages=messages)
            return float(answer.choices[0].message.content == "blue")

        runner = al.LitAgentRunner[str](al.DummyTracer())
        with runner.run_context(agent=solve, store=store):
            done = await runner.step("sky?")
        await proxy.stop()
        assert not proxy.is_running()
        spans = await store.query_spans(done.rollout_id)
        calls = [s for s in spans if s.attributes.get("gen_ai.agent.name") == "llm_proxy"]
        assert len(calls) == 2
        assert all("blue" in str(s.attributes["gen_ai.output.messages"]) for s in calls)
        assert al.find_final_reward(spans) == 1.0
        assert provider.seen[0].headers["authorization"] == "Bearer sk-its-own"
        assert provider.seen[0].body["model"] == "org/tiny"
        assert provider.seen[0].body["return_token_ids"] is True
        assert "sk-its-own" not in str(spans)
        await store.close()


@in_loop
async def test_a_path_that_names_nothing_is_answered() -> None:
    with serve(says("blue")) as provider:
        store = al.InMemoryLightningStore()
        proxy = al.LLMProxy(model_list=[model(provider)], store=store)
        await proxy.start()
        async with httpx.AsyncClient(base_url=str(proxy.endpoint)) as client:
            for path in ("/", "/keys", "/keys/", "/keys/wrong", "/v1", "/rollout/r/attempt/1", "/keys/%ff/v1/models"):
                assert (await client.get(path)).status_code == 404, path
            proxy.server_launcher_args.host = "0.0.0.0"
            for path in ("/", "/keys", "/keys/wrong/v1/models", "/v1/models"):
                assert (await client.get(path)).status_code == 401, path
            assert (await client.get(f"/keys/{proxy._secret}")).status_code == 404  # type: ignore[attr-defined]
        await proxy.stop()
        await store.close()


def test_the_proxys_resource_names_a_model_and_an_attempt() -> None:
    proxy = al.LLMProxy(model_list=[{"model_name": n, "litellm_params": {"model": "gpt-4o"}} for n in ("a", "b")])
    with pytest.raises(ValueError, match="Multiple models"):
        proxy.as_resource()
    with pytest.raises(ValueError, match="Store is not set"):
        asyncio.run(proxy.start())
    with pytest.raises(ConfigError, match="api_base"):
        proxy.update_model_list([{"model_name": "x", "litellm_params": {"model": "hosted_vllm/m"}}])
    for refused in ({"num_retries": 3}, {"callbacks": [object]}):
        with pytest.raises(ConfigError):
            al.LLMProxy(**refused)  # type: ignore[arg-type]


# -- strategies and components ----------------------------------------------------------------------------------------
def test_a_strategy_of_ones_own_runs_the_bundles(tmp_path: Path) -> None:
    class InTurn(al.ExecutionStrategy):
        def execute(self, algorithm: Any, runner: Any, store: al.LightningStore) -> None:
            async def both() -> None:
                event = al.ThreadingEvent()
                running = asyncio.ensure_future(runner(store, 0, event))
                await algorithm(store, event)
                event.set()
                await running

            asyncio.run(both())

    found: list[Any] = []

    @al.algo
    async def measure(*, store: al.LightningStore, train_dataset: Any) -> None:
        ids = [(await store.enqueue_rollout(task, mode="train")).rollout_id for task in train_dataset]
        done = await store.wait_for_rollouts(rollout_ids=ids, timeout=30)
        found.extend([(r.input, al.find_final_reward(await store.query_spans(r.rollout_id))) for r in done])

    @al.rollout
    def solve(task: int) -> float:
        return task / 10

    store = al.InMemoryLightningStore()
    trainer = al.Trainer[int](algorithm=measure, strategy=InTurn(), store=store, n_runners=1)
    assert trainer.fit(solve, [1, 2]) is None
    assert sorted(found) == [(1, 0.1), (2, 0.2)]
    with pytest.raises(TypeError, match="may train"):
        trainer.dev(solve, [1])


def test_components_are_built_from_names_and_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_SERVER_PORT", "10000")
    monkeypatch.setenv("AGL_CURRENT_ROLE", "algorithm")
    trainer = al.Trainer(strategy="cs", n_runners=3, tracer="agentlightning.OtelTracer", runner={"max_rollouts": 2})
    assert isinstance(trainer.strategy, al.ClientServerExecutionStrategy)
    assert (trainer.strategy.role, trainer.strategy.server_port, trainer.strategy.n_runners) == ("algorithm", 10000, 3)
    assert isinstance(trainer.tracer, al.OtelTracer)
    assert (trainer.runner.tracer, trainer.runner.max_rollouts) == (trainer.tracer, 2)
    assert al.Trainer(strategy={"server_port": 5, "role": "both"}, port=6).strategy.server_port == 6  # type: ignore[attr-defined]
    assert isinstance(al.Trainer().strategy, al.SharedMemoryExecutionStrategy)
    with pytest.raises(ValueError, match="role="):
        al.ClientServerExecutionStrategy("neither")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="names no class"):
        al.build_component("nowhere.Class", expected_type=al.Trainer, spec_name="x")


def test_max_tasks_bounds_the_tasks(tmp_path: Path) -> None:
    seen: list[int] = []

    @al.rollout
    def solve(task: int) -> float:
        seen.append(task)
        return 1.0

    al.Trainer(algorithm=al.Baseline(), max_tasks=2, directory=tmp_path / "r").fit(solve, [1, 2, 3])
    assert sorted(seen) == [1, 2]


def test_the_trainers_options_come_from_the_command_line() -> None:
    class Options:
        def __init__(self, steps: int = 1, name: str | None = None, n_runners: int = 1) -> None:
            self.steps, self.name, self.n_runners = steps, name, n_runners

    line = ["--n-runners", "4", "--no-dev", "--steps", "7", "--initial_resources", '{"a": 1}']
    trainer, options = al.lightning_cli(al.Trainer, Options, args=line)
    assert (trainer.n_runners, trainer.initial_resources) == (4, {"a": 1})
    assert (options.steps, options.name, options.n_runners) == (7, None, 4)


@pytest.mark.parametrize("command", ["vllm", "prometheus", "agentops"])
def test_a_subcommand_that_is_not_here_says_what_to_use(command: str) -> None:
    from agl_agentlightning.cli import main

    with pytest.raises(ConfigError) as refused:
        main([command])
    assert refused.value.hint
