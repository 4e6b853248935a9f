"""Agent Lightning 0.3's names: each is there under its old path, and does what its users expect of it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from scripted import in_loop
from verl_config import CONFIG

import agl.compat as al
from agl.compat import semconv
from agl.compat import types as T
from agl.errors import ConfigError, RewardError, RolloutError
from agl.testing.provider import Provider, says, serve


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(says("blue")) as server:
        yield server


def ask(llm: Any, text: str) -> str:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "sk", max_retries=0)
    answer = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


# -- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", al.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(al, name) is not None


@pytest.mark.parametrize("module", al._NAMES)
def test_a_type_checker_sees_every_name(module: str) -> None:
    home = importlib.import_module(f"agl_agentlightning.{module}")
    assert {*al._NAMES[module].split()} <= {*home.__all__}
    assert f"from {home.__name__} import" in Path(al.__file__).with_suffix(".pyi").read_text()


def test_the_old_module_paths_lead_to_them() -> None:
    from agl.compat.adapter import TracerTraceToTriplet
    from agl.compat.algorithm.decorator import algo
    from agl.compat.algorithm.verl import VERL
    from agl.compat.store.base import LightningStore
    from agl.compat.types.core import Rollout

    assert (VERL, algo, TracerTraceToTriplet) == (al.VERL, al.algo, al.TracerTraceToTriplet)
    assert (LightningStore, Rollout) == (al.LightningStore, al.Rollout)
    assert isinstance(al.algorithm(lambda store: None), al.Algorithm)
    assert al.reward.emit_reward is al.emit_reward
    assert al.GRPO is __import__("agl").GRPO
    from agl.compat.algorithm import APO
    from agl.compat.algorithm.apo import APO as APO_of_its_package

    assert APO is APO_of_its_package is al.APO


def test_importing_them_loads_neither_torch_nor_a_framework() -> None:
    code = "import agl.compat as al; al.LLM, al.rollout, al.LitAgent, al.Trainer, al.InMemoryLightningStore; "
    code += "import sys; print({'torch', 'langchain', 'agent_framework', 'sqlalchemy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_an_unchanged_program_runs_under_python_m(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, agentlightning as agl\nfrom agentlightning.tracer import AgentOpsTracer\n"
        "print(agl.Trainer.__module__, AgentOpsTracer is agl.AgentOpsTracer, sys.argv[1:])\n"
    )
    run = [sys.executable, "-m", "agl.compat", str(program), "--debug"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split("\n")[0] == "agl_agentlightning.trainer True ['--debug']", done.stderr


@pytest.mark.parametrize("name", ["WeaveTracer", "CollectionBasedLightningStore"])
def test_what_is_missing_says_so_and_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        getattr(al, name)()
    assert refused.value.hint


@pytest.mark.parametrize("option", [{"strategy": "ray"}, {"runner": 3}, {"daemon": False}, {"n_runer": 2}])
def test_a_trainers_option_is_never_ignored(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        al.Trainer(**option)


@in_loop
async def test_a_store_is_served_and_reached_under_its_old_names() -> None:
    server = al.LightningStoreServer(al.InMemoryLightningStore())
    with pytest.raises(ConfigError, match="has not been started"):
        _ = server.endpoint
    await server.start()
    client = al.LightningStoreClient(server.endpoint)
    queued = await client.enqueue_rollout({"q": 1})
    leased = await server.store.dequeue_rollout("w")
    assert leased is not None
    assert leased.rollout_id == queued.rollout_id
    await client.update_attempt(queued.rollout_id, "latest", status="succeeded")
    assert [r.status for r in await client.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=20)] == [
        "succeeded"
    ]
    await client.close()
    await server.stop()
    await server.stop()


# -- the store --------------------------------------------------------------------------------------------------------
@in_loop
async def test_a_question_that_is_enqueued_twice_is_sampled_twice() -> None:
    store = al.InMemoryLightningStore()
    for _ in range(8):
        await store.enqueue_rollout("2+2")
    assert len({r.seed for r in await store.agl_store.query_rollouts()}) == 8
    await store.close()


@in_loop
async def test_a_rollouts_life_by_hand() -> None:
    store = al.InMemoryLightningStore()
    resources = await store.add_resources({"prompt": al.PromptTemplate("Hi {x}", "f-string")})
    queued = await store.enqueue_rollout({"q": 1}, mode="test", resources_id=resources.resources_id, metadata={"a": 1})
    assert (queued.input, queued.mode, queued.status, queued.metadata) == ({"q": 1}, "test", "queuing", {"a": 1})
    leased = await store.dequeue_rollout("w")
    assert leased is not None
    assert (leased.rollout_id, leased.attempt.sequence_id, leased.attempt.worker_id) == (queued.rollout_id, 1, "w")
    assert await store.dequeue_rollout() is None

    number = await store.get_next_span_sequence_id(leased.rollout_id, leased.attempt.attempt_id)
    span = T.Span.from_attributes(
        attributes={"agentlightning.reward.0.value": 0.5}, rollout_id=leased.rollout_id,
        attempt_id=leased.attempt.attempt_id, sequence_id=number, name="r",
    )  # fmt: skip
    await store.add_span(span)
    latest = await store.get_latest_attempt(leased.rollout_id)
    assert latest is not None
    assert latest.status == "running"
    spans = await store.query_spans(leased.rollout_id, "latest", name="r")
    assert [s.sequence_id for s in spans] == [number]
    assert al.find_final_reward(spans) == 0.5
    assert await store.query_spans(leased.rollout_id, name_contains="zzz") == []

    assert await store.wait_for_rollouts(rollout_ids=[leased.rollout_id], timeout=0.01) == []
    await store.update_attempt(leased.rollout_id, "latest", status="succeeded")
    [done] = await store.wait_for_rollouts(rollout_ids=[leased.rollout_id], timeout=5)
    assert done.status == "succeeded"
    assert [r.rollout_id for r in await store.query_rollouts(status_in=["succeeded"])] == [leased.rollout_id]
    assert (await store.statistics())["succeeded"] == 1
    await store.close()


@in_loop
async def test_started_rollouts_are_nobody_elses_and_retries_are_by_config() -> None:
    store = al.InMemoryLightningStore()
    started = await store.start_rollout("mine")
    assert (started.input, started.status, started.attempt.status) == ("mine", "preparing", "preparing")
    config = al.RolloutConfig(max_attempts=2, retry_condition=["failed"])
    again = await store.enqueue_rollout("again", config=config)
    leased = await store.dequeue_rollout()
    assert leased is not None
    assert leased.rollout_id == again.rollout_id
    await store.update_attempt(leased.rollout_id, leased.attempt.attempt_id, status="failed")
    retried = await store.get_rollout_by_id(leased.rollout_id)
    assert retried is not None
    assert retried.status == "requeuing"
    cancelled = await store.update_rollout(leased.rollout_id, status="cancelled")
    assert cancelled.status == "cancelled"
    await store.close()


@in_loop
async def test_resources_have_versions_and_keep_their_keys_in_this_process() -> None:
    store = al.InMemoryLightningStore()
    llm = al.LLM(endpoint="http://x/v1", model="m", api_key="sk-secret", sampling_parameters={"temperature": 0.1})
    first = await store.add_resources({"main_llm": llm})
    second = await store.update_resources("mine", {"main_llm": al.LLM(endpoint="http://y/v1", model="m")})
    assert (first.version, second.version, second.resources_id) == (1, 1, "mine")
    found = await store.get_resources_by_id(first.resources_id)
    assert found is not None
    assert found.resources["main_llm"] == llm
    latest = await store.get_latest_resources()
    assert latest is not None
    assert latest.resources["main_llm"].endpoint == "http://y/v1"
    assert latest.create_time > 0
    assert "sk-secret" not in str(await store.agl_store.get_resources(first.resources_id))
    await store.close()


# -- algorithms, agents, hooks ----------------------------------------------------------------------------------------
class Recorder(al.Hook):
    """Keeps what it was called with; emits a reward at the end of the trace."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        self.seen.append(("rollout_start", rollout.input))

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.seen.append(("trace_start", rollout.attempt.sequence_id))

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.seen.append(("trace_end", [s.operation for s in tracer.get_last_trace()]))
        al.emit_reward(0.25)

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        self.seen.append(("rollout_end", al.find_final_reward(spans)))


def by_hand(url: str, found: list[Any]) -> al.FunctionalAlgorithm:
    """An algorithm that offers two prompts, waits, and reads the rewards and the conversations from the store."""

    @al.algo
    async def search(*, store: al.LightningStore, train_dataset: Any, initial_resources: Any, adapter: Any) -> None:
        for prompt in ("Say {x}", "Shout {x}"):
            llm = al.LLM(endpoint=url, model="m", api_key="sk")
            resources = {**initial_resources, "llm": llm, "prompt": al.PromptTemplate(prompt, "f-string")}
            update = await store.add_resources(resources)
            queued = [
                await store.enqueue_rollout(task, mode="train", resources_id=update.resources_id)
                for task in train_dataset
            ]
            ids = [r.rollout_id for r in queued]
            done = await store.wait_for_rollouts(rollout_ids=ids, timeout=60)
            for rollout in done:
                spans = await store.query_spans(rollout.rollout_id)
                [triplet] = adapter.adapt(spans)
                [talk] = al.TraceToMessages().adapt(spans)
                found.append((prompt, rollout.status, al.find_final_reward(spans), triplet.reward, talk["messages"]))

    return search


@pytest.mark.full
@pytest.mark.parametrize("is_async", [False, True])
def test_an_algorithm_by_hand(provider: Provider, tmp_path: Path, is_async: bool) -> None:
    def solve(task: Any, llm: al.LLM, prompt_template: al.PromptTemplate, rollout: al.AttemptedRollout) -> float:
        assert (rollout.input, rollout.mode, rollout.attempt.status) == (task, "train", "running")
        return float(ask(llm, prompt_template.format(x=task)) == "blue")

    async def solve_async(
        task: Any, llm: al.LLM, prompt_template: al.PromptTemplate, rollout: al.AttemptedRollout
    ) -> float:
        return await asyncio.to_thread(solve, task, llm, prompt_template, rollout)

    agent = al.rollout(solve_async if is_async else solve)
    found: list[Any] = []
    hook = Recorder()
    trainer = al.Trainer(
        algorithm=by_hand(provider.url, found), n_workers=2, initial_resources={}, hooks=hook, directory=tmp_path / "r",
        adapter={"agent_match": None}, strategy="shm",
    )  # fmt: skip
    trainer.fit(agent, ["a", "b"])
    assert sorted((p, s, final, given) for p, s, final, given, _ in found) == [
        (p, "succeeded", 1.0, 1.0) for p in ("Say {x}", "Say {x}", "Shout {x}", "Shout {x}")
    ]
    said = {tuple(m["content"] for m in talk) for *_, talk in found}
    assert said == {(f"{verb} {x}", "blue") for verb in ("Say", "Shout") for x in "ab"}
    assert len(hook.seen) == 16
    assert ("rollout_end", 1.0) in hook.seen
    assert [v for k, v in hook.seen if k == "trace_end"] == [["chat"]] * 4  # the root span is still open
    assert len(asyncio.run(trainer.store.query_rollouts())) == 4


def test_a_hook_that_fails_fails_its_rollout(provider: Provider, tmp_path: Path) -> None:
    class Broken(al.Hook):
        async def on_trace_end(self, **_: Any) -> None:
            raise ZeroDivisionError("oh")

    @al.rollout
    def solve(task: Any) -> float:
        return 1.0

    trainer = al.Trainer(algorithm=al.Baseline(), hooks=[Broken()], directory=tmp_path / "r", max_attempts=1)
    with pytest.raises(RolloutError, match=r"Broken.on_trace_end raised ZeroDivisionError"):
        trainer.fit(solve, ["a"])


class Colours(al.LitAgent[dict]):
    """0.3's class form, with a validation of its own."""

    def training_rollout(self, task: Any, resources: al.NamedResources, rollout: al.Rollout) -> float:
        return 1.0 if rollout.mode == "train" else 0.5

    def validation_rollout(self, task: Any, resources: al.NamedResources, rollout: al.Rollout) -> Any:
        al.emit_reward({"main": 0.75, "style": 0.1}, primary_key="main")


@in_loop
async def test_a_runner_steps_through_an_agent() -> None:
    store = al.InMemoryLightningStore()
    hook = Recorder()
    runner = al.LitAgentRunner(al.OtelTracer())
    with runner.run_context(agent=Colours(), store=store, hooks=[hook]):
        trained = await runner.step({"q": 1}, mode="train")
        checked = await runner.step({"q": 1}, resources={"p": al.PromptTemplate("x")})
        assert (trained.status, checked.status) == ("succeeded", "succeeded")
        rewards = [al.get_reward_value(s) for s in await store.query_spans(checked.rollout_id)]
        assert sorted(r for r in rewards if r is not None) == [0.25, 0.75]
        for _ in range(3):
            await store.enqueue_rollout({"q": 2}, mode="train")
        runner.max_rollouts = 2
        await runner.iter()
    assert len(await store.query_rollouts(status_in=["queuing"])) == 1
    assert len(await store.query_rollouts(status_in=["succeeded"])) == 4
    await store.close()


@in_loop
async def test_a_runner_raises_what_the_agent_raised() -> None:
    @al.rollout
    async def broken(task: Any) -> float:
        raise KeyError("gone")

    runner = al.LitAgentRunner()
    with (
        runner.run_context(agent=broken, store=al.InMemoryLightningStore()),
        pytest.raises(KeyError, match="gone"),
    ):
        await runner.step("x")


@in_loop
async def test_spans_that_an_agent_returns_are_its_rewards() -> None:
    @al.rollout
    def scored(task: Any) -> Any:
        return [T.Span.from_attributes(attributes={"agentlightning.reward.0.value": 0.5}, attempt_id="x-at-1")]

    store = al.InMemoryLightningStore()
    runner = al.LitAgentRunner()
    with runner.run_context(agent=scored, store=store):
        done = await runner.step("x")
    assert al.find_final_reward(await store.query_spans(done.rollout_id)) == 0.5


@in_loop
async def test_a_trace_of_ones_own(provider: Provider) -> None:
    tracer = al.AgentOpsTracer()
    with tracer.lifespan():
        async with tracer.trace_context("t"):
            llm = al.LLM(provider.url, "m")
            with al.operation(name="outer") as step:
                step.set_output({"said": ask(llm, "hi")})
            al.emit_message("note")
    spans = tracer.get_last_trace()
    assert [s.operation for s in spans] == ["invoke_agent", "operation", "chat", "message"]
    assert spans[1].attributes["agentlightning.operation.output.said"] == "blue"
    assert (spans[1].name, spans[1].attributes["agentlightning.operation.name"]) == (semconv.AGL_OPERATION, "outer")
    assert al.get_message_value(spans[3]) == "note"
    [triplet] = al.TracerTraceToTriplet(llm_call_match="chat").adapt(spans)
    assert triplet.response["raw_content"]
    assert al.TracerTraceToTriplet(agent_match="writer").adapt(spans) == []


def test_a_filter_that_matches_no_call_is_refused() -> None:
    trainer = al.Trainer(algorithm=al.Baseline(), adapter=al.TracerTraceToTriplet(llm_call_match="litellm"))
    with pytest.raises(ConfigError, match="matches no LLM call"):
        trainer.fit(Colours(), ["x"])


@pytest.mark.parametrize("given", [{"a": 1.0}, {"a": 1.0, "b": 2.0}])
def test_a_dict_of_rewards_needs_its_primary_key(given: dict[str, float]) -> None:
    with pytest.raises(RewardError):
        al.emit_reward(given)


def test_a_decorated_function_stays_a_function_and_is_checked() -> None:
    @al.rollout
    def f(task: Any, llm: al.LLM) -> str:
        return f"{task} {llm.model}"

    assert f("t", al.LLM("http://x/v1", "m")) == "t m"
    assert f.rollout("t", {"main_llm": al.LLM("http://x/v1", "m")}, None) == "t m"
    assert list(inspect.signature(f).parameters) == ["task", "llm"]
    with pytest.raises(ConfigError, match="takes"):
        al.rollout(lambda task, colour: 0.0)


@in_loop
async def test_a_trace_makes_opentelemetry_spans_that_name_their_attempt() -> None:
    store = al.InMemoryLightningStore()
    rollout = await store.start_rollout(input="x")
    tracer = al.OtelTracer()
    with tracer.lifespan(store):
        where = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context("manual", store=store, **where) as trace:
            with trace.start_as_current_span("outer"), trace.start_as_current_span("inner"):
                pass
    outer, inner = sorted(await store.query_spans(rollout.rollout_id), key=lambda span: span.name, reverse=True)
    assert (outer.name, inner.name, inner.parent_id) == ("outer", "inner", outer.span_id)
    assert inner.resource.attributes["agentlightning.rollout_id"] == rollout.rollout_id
    assert inner.resource.attributes["agentlightning.attempt_id"] == rollout.attempt.attempt_id


def test_keys_that_03_added_to_a_verl_config(caplog: pytest.LogCaptureFixture) -> None:
    config = {**CONFIG, "agentlightning": {"trace_aggregator": {"level": "trajectory"}}}
    al.VERL(config)
    assert "agentlightning.trace_aggregator.level: without effect" in caplog.text
    with pytest.raises(ConfigError, match="training on images is not available"):
        al.VERL({**CONFIG, "data.image_base_dir": "images"})
