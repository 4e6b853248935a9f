"""A training server and its clients as real processes, and what each refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos import trained_once
from paths import SUPPORT
from processes import AGL, Programs, fetch, free_port, programs
from scripted import in_loop, until

import agl
from agl import semconv
from agl.agents.resources import LLM, RolloutResources
from agl.errors import ConfigError, DatasetError, ServiceError
from agl.trainer.algorithms.options import Settings, algorithm_class
from agl.trainer.http.auth import Keys
from agl.trainer.quickstart.tasks import arithmetic_tasks
from agl.trainer.store import open_store
from agl_service.client import client_agent
from agl_service.server import serving

CONFIG = """
model:
  max_context: 256
training:
  algorithm: "grpo"
  learning_rate: 5e-4
  batch_size: 2
  group_size: 4
  steps: {steps}
  max_response_tokens: 48
  val_every: 100
runtime:
  nworkers: 4
  silent_seconds: 8
"""
CLIENT = [sys.executable, str(SUPPORT / "service_agents.py")]
SECONDS = 150


def _server(at: Programs, policy: Path, port: int, name: str = "server") -> Any:
    options = ("--model", policy, "--gpus", 0, "--port", port, "--config", "run.yaml", "--directory", "out")
    started = at.start(*AGL, "serve", *options, log=f"{name}.log")
    at.until(lambda: fetch(f"http://127.0.0.1:{port}/health")[0] == 200, SECONDS, "the server")
    return started


def _workspace(directory: Path, steps: int) -> None:
    for name, n, split in (("train", 16, "train"), ("test", 4, "heldout")):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, arithmetic_tasks(n, seed=0, split=split))))
    (directory / "run.yaml").write_text(CONFIG.format(steps=steps))


@pytest.mark.slow
def test_a_run_outlives_its_server_and_its_clients(tiny_policy: Path, tmp_path: Path) -> None:
    _workspace(tmp_path, steps=4)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with programs(tmp_path, AGENT_LIGHTNING_SERVER_URL=url) as at:

        def step_of(run: str = "latest") -> int:
            return fetch(f"{url}/runs/{run}")[1]["step"]

        # The server is killed in the midst of a run; who works for it goes on when it is back.
        server = _server(at, tiny_policy, port)
        first = at.start(*CLIENT, "openai", "first.json", "--upload", log="first.log")
        at.until(lambda: step_of() >= 1, SECONDS, "a step")
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        server = _server(at, tiny_policy, port)
        run = fetch(f"{url}/runs/latest")[1]
        assert (run["status"], len(fetch(f"{url}/runs")[1]["runs"])) == ("running", 1)
        # The client is killed too; another one, on another API, finishes the run.
        at.until(lambda: step_of() >= 2, SECONDS, "a step of the server that was started again")
        assert first.poll() is None, at.text("first.log")
        os.killpg(first.pid, signal.SIGKILL)
        second = at.start(*CLIENT, "anthropic", "second.json", log="second.log")
        at.until(lambda: second.poll() is not None, SECONDS, "the second client")
        assert second.returncode == 0, at.text("second.log")
        told = json.loads((tmp_path / "second.json").read_text())
        assert (told["status"], told["run_id"]) == ("succeeded", run["run_id"])
        steps = [h for h in told["history"] if "train/reward" in h]
        assert [h["step"] for h in steps] == [1, 2, 3, 4]
        assert all(h["train/rows"] > 0 for h in steps)
        assert (tmp_path / told["policy"] / "config.json").is_file()

        os.kill(server.pid, signal.SIGINT)
        at.until(lambda: server.poll() is not None, 30, "the server's end")
        assert server.returncode == 0
    calls = asyncio.run(_calls(tmp_path / "out" / "store.db", run["run_id"]))
    assert asyncio.run(_trained(tmp_path / "out" / "store.db", run["run_id"]))
    assert {c.agent for c in calls} == {"solver"}
    assert {"anthropic" if c.id.startswith("msg") else "openai" for c in calls} == {"openai", "anthropic"}
    assert all(c.policy == "policy" and c.response_ids.size for c in calls)


async def _trained(path: Path, run_id: str) -> int:
    """How many calls were trained, each once."""
    store = await open_store(str(path))
    try:
        return await trained_once(store, await store.query_rollouts(run_id=run_id, mode="train"))
    finally:
        await store.close()


async def _calls(path: Path, run_id: str) -> list[Any]:
    store = await open_store(str(path))
    try:
        done = await store.query_rollouts(run_id=run_id, mode="train", status=["succeeded"])
        calls = [c for r in done for c in await store.query_calls(r.rollout_id, r.attempts) if c.error is None]
        for rollout in done:
            spans = await store.query_spans(rollout.rollout_id, rollout.attempts)
            assert semconv.REWARD in {s.operation for s in spans}
        return calls
    finally:
        await store.close()


def _settings(model: Path, out: Path, **more: Any) -> Settings:
    given = {"model": str(model), "algorithm": "grpo", "gpus": 0, "port": 0, "directory": str(out), "threads": 1}
    return Settings.of({**given, **more}, "test")


@pytest.mark.slow
@in_loop
async def test_one_run_at_a_time(untrained_model: Path, tmp_path: Path) -> None:
    settings = _settings(untrained_model, tmp_path, steps=2, group_size=2, batch_size=1)
    async with serving(settings, Keys(), progress=False) as service:
        url = service.mount.url

        async def ask(path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
            return await asyncio.to_thread(fetch, f"{url}{path}", body, **options)

        status, told = await ask("/train", {})
        assert (status, told["error"]["type"]) == (400, "DatasetError")
        assert "upload_data" in told["error"]["hint"]
        await ask("/data/train", b'{"question": "2+2"}\n', method="PUT")
        status, run = await ask("/train", {"settings": {"steps": 3}})
        assert (status, run["status"], run["settings"]["steps"]) == (201, "running", 3)
        status, told = await ask("/train", {"settings": {"steps": 3}})
        assert (status, told["error"]["code"]) == (409, "run_goes_on")
        assert run["run_id"] in told["error"]["message"]
        assert (await ask("/train", {"settings": {"steps": 3}, "join": True}))[1]["run_id"] == run["run_id"]
        assert (await ask("/train", {"join": True}))[0] == 200
        status, told = await ask("/train", {"settings": {"steps": 4}, "join": True})
        assert status == 409
        assert "steps=3" in told["error"]["message"]
        assert (await ask("/runs/latest/result"))[0] == 409
        with pytest.raises(ConfigError, match="is in use by process"):
            async with serving(settings, Keys(), progress=False):
                pass
        status, stopped = await ask(f"/runs/{run['run_id']}/stop", {})
        assert (status, stopped["status"]) == (200, "stopped")
        status, again = await ask("/train", {"resume": True})
        assert (status, again["run_id"], again["status"]) == (201, run["run_id"], "running")
    # The next server goes on with what was going on.
    async with serving(settings, Keys(), progress=False) as service:
        assert service.current is not None
        assert service.current.run_id == run["run_id"]
        await service.stop("latest")
    async with serving(settings, Keys(), progress=False) as service:
        assert service.current is None


@pytest.mark.slow
@in_loop
async def test_ctrl_c_ends_a_client_and_leaves_its_run(untrained_model: Path, tmp_path: Path) -> None:
    settings = _settings(untrained_model, tmp_path / "out", steps=50, group_size=8, batch_size=8, max_response_tokens=8)
    _workspace(tmp_path, steps=1)
    async with serving(settings, Keys(), progress=False) as service:
        with programs(tmp_path, AGENT_LIGHTNING_SERVER_URL=service.mount.url) as at:
            client = at.start(*CLIENT, "openai", "client.json", "--upload", log="client.log")
            await until(lambda: service.current is not None and service.current.rollouts[0] > 0, SECONDS)
            os.kill(client.pid, signal.SIGINT)
            await until(lambda: client.poll() is not None, 20.0)
            assert "KeyboardInterrupt" in at.text("client.log")
        assert service.current is not None
        assert not (tmp_path / "client.json").exists()
        await service.stop("latest")


@pytest.mark.slow
@in_loop
async def test_a_run_that_fails_says_why_to_its_client(tmp_path: Path) -> None:
    settings = _settings(tmp_path / "nothing", tmp_path, steps=2)
    async with serving(settings, Keys(), progress=False) as service:
        client = agl.Client(service.mount.url, progress=False)
        await asyncio.to_thread(client.upload_data, [{"question": "2+2"}])
        with pytest.raises(ServiceError, match=r"run run-\w+ failed on the server: .*nothing"):
            await asyncio.to_thread(client.train, lambda resource, task: 1.0)
        assert client.run.__self__ is client
        assert (await asyncio.to_thread(client.run))["status"] == "failed"


@in_loop
async def test_what_a_server_refuses(untrained_model: Path, tmp_path: Path) -> None:
    keys = Keys.of("operator-key-of-this-test", "runner-key-of-this-test")
    async with serving(_settings(untrained_model, tmp_path), keys, progress=False) as service:
        url = service.mount.url

        async def ask(path: str, body: Any = None, key: str = "operator", **options: Any) -> tuple[int, Any]:
            headers = {"authorization": f"Bearer {key}-key-of-this-test"}
            return await asyncio.to_thread(fetch, f"{url}{path}", body, **headers, **options)

        assert (await ask("/data", key="no"))[0] == 401
        assert (await ask("/train", {}, key="runner"))[0] == 403
        lease = {"worker_id": "w", "wait": 0, "request_id": "r"}
        for key, status in (("no", 401), ("runner", 200), ("operator", 200)):
            headers = {"authorization": f"Bearer {key}-key-of-this-test"}
            assert await asyncio.to_thread(_status, f"{url}/runner/lease", lease, headers) == status
        status, told = await ask("/train", {"settings": {"lerning_rate": 1.0}})
        assert status == 400
        assert told["error"]["message"] == "train(): there is no option 'lerning_rate'"
        assert told["error"]["hint"] == "did you mean 'learning_rate'?"
        assert (await ask("/train", {"settings": {"model": "other"}}))[0] == 400
        assert (await ask("/train", {"setings": {}}))[1]["error"]["message"].startswith("setings: ")
        assert (await ask("/train", b"{"))[0] == 400
        assert (await ask("/runs/none"))[0] == 404
        assert (await ask("/nothing"))[0] == 404
        assert (await ask("/data/dev", b"{}", method="PUT"))[0] == 404
        status, told = await ask("/data/train?name=mine.jsonl", b'{"a": 1}\n{"a": \n', method="PUT")
        assert (status, told["error"]["type"]) == (400, "DatasetError")
        assert "line 2 is not JSON" in told["error"]["message"]
        assert told["error"]["where"] == {"path": "mine.jsonl"}
        schema = (await ask("/openapi.json", key="no"))[1]
        assert {"/train", "/data/{split}", "/runs/{run_id}/events", "/v1/store/enqueue_rollouts"} <= set(
            schema["paths"]
        )
        assert (await ask("/v1/store/query_rollouts", {}))[0] == 200
        assert (await ask("/v1/store/query_rollouts", {}, key="runner"))[0] == 403
        client = agl.Client(url, key="wrong-key-of-this-test", progress=False)
        with pytest.raises(ServiceError, match="AGL_KEY"):
            await asyncio.to_thread(client.upload_data, [{"q": 1}])
        with_key = f"http://:operator-key-of-this-test@{url.removeprefix('http://')}"
        assert await asyncio.to_thread(agl.Client(with_key).upload_data, [{"q": 1}] * 3) == {"train": 3, "test": 0}


def _status(url: str, body: Any, headers: dict[str, str]) -> int:
    import httpx

    return httpx.post(url, json=body, headers=headers, trust_env=False).status_code


def test_a_server_for_other_machines_needs_a_key(untrained_model: Path, tmp_path: Path) -> None:
    async def listen() -> None:
        async with serving(_settings(untrained_model, tmp_path, host="0.0.0.0"), Keys()):
            raise AssertionError

    with pytest.raises(ConfigError, match="without a key"):
        asyncio.run(listen())


# -- settings ---------------------------------------------------------------------------------------------------------

SEED = """
model:
  name: "meta-llama/Llama-3.2-3B-Instruct"
training:
  algorithm: "grpo"
  learning_rate: 5e-7
  batch_size: 256
  group_size: 8
  kl_coef: 0.001
  epochs: 1
runtime:
  nworkers: 8
  auto_instrumentation: true
  air_enabled: true
"""


def test_the_file_that_people_have(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(SEED)
    settings = Settings.of_file(tmp_path / "config.yaml")
    settings.check()
    algorithm = settings.algorithm()
    assert (algorithm.model, algorithm.learning_rate) == ("meta-llama/Llama-3.2-3B-Instruct", 5e-7)
    assert (algorithm.batch_size, algorithm.group_size, algorithm.epochs) == (256, 8, 1)
    assert (settings.get("n_workers"), settings.get("air")) == (8, True)


def test_the_command_line_beats_the_file_and_that_the_environment(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("training:\n  algorithm: rloo\n  epochs: 2\n  batch_size: 4\n")
    environment = Settings.of_environment({"LIGHTNING_MODEL_PATH": "m", "LIGHTNING_RL_ALGORITHM": "ppo"})
    file = Settings.of_file(tmp_path / "run.yaml")
    assert (environment.get("model"), environment.get("algorithm")) == ("m", "ppo")
    below = environment.under(file)
    assert (below.get("model"), below.get("algorithm")) == ("m", "rloo")
    settings = below.under(Settings.of({"steps": 7}, "--set steps=7"))
    algorithm = settings.algorithm()
    assert isinstance(algorithm, agl.RLOO)
    assert (algorithm.steps, algorithm.epochs, algorithm.batch_size) == (7, None, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training:\n\n  lerning_rate: 1e-5", "line 3: training has no option 'lerning_rate'\n  -> did you mean"),
        ("runtme:\n  nworkers: 1", r"line 2: there is no section 'runtme'\n  -> did you mean 'runtime'"),
        ("training:\n  nworkers: 1", r"line 2: training has no option 'nworkers'\n  -> it belongs to runtime:"),
        ("training:\n  batch_size: many", r"line 2: batch_size is 'many'"),
        ("training:\n  steps: 1\n  steps: 2", r"line 3: steps is set twice: steps \(.*line 2\) sets it, too"),
        ("runtime:\n  nworkers: 1\n  n_workers: 2", r"line 3: n_workers is set twice: nworkers \(.*line 2\)"),
        ("training: 3", r"line 1: training must be a mapping"),
        ("training: [", r"line 1: not YAML"),
        ("model:\n  name: gpt-4o", r"line 2: 'gpt-4o' cannot be trained"),
        ("model:\n  name: m\n  gpus: 4", r"line 3: the embedded trainer uses one GPU, not 4\n.*VERL"),
        ("model:\n  name: m\ntraining:\n  algorithm: groo", r"line 4: there is no algorithm 'groo'\n  -> did you mean"),
        ("model:\n  name: m\nruntime:\n  auto_instrumentation: false", "line 4: instrumentation cannot be"),
        ("model:\n  name:", r"no model given"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_told_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Settings.of_file(tmp_path / "run.yaml").check()


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("grpo", "GRPO"),
        ("LightningRL", "GRPO"),
        ("PPO", "PPO"),
        ("dr-grpo", "DrGRPO"),
        ("REINFORCE", "REINFORCE"),
        ("REINFORCE++", "REINFORCEPlusPlus"),
    ],
)
def test_algorithms_by_name(name: str, cls: str) -> None:
    assert algorithm_class(name).__name__ == cls


# -- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message", "where"),
    [
        (['{"question": "a"}', "nonsense"], "line 2 is not JSON", {}),
        (['{"question": "a", "answer": 1}'] * 3 + ['{"question": "a", "anwser": 1}'],
         "line 4 has no field 'answer'.*\n  -> did you mean 'anwser'", {"line": 4, "field": "answer"}),
        (['{"question": "a", "answer": 1}', '{"question": "a"}'], "line 2 has no field 'answer'", {"line": 2}),
        (['{"question": "a"}', '["b"]'], "line 2 is a list, while line 1 is an object", {"line": 2}),
        (["", " "], "the task file is empty", {}),
    ],
)  # fmt: skip
def test_tasks_that_are_wrong_are_told_with_file_line_and_field(
    lines: list[str], message: str, where: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(DatasetError, match=message) as caught:
        agl.Client("http://127.0.0.1:9").upload_data(file)
    assert caught.value.where.items() >= {"path": file, **where}.items()


def test_tasks_that_are_right(tmp_path: Path) -> None:
    from agl.trainer.run.data import read_tasks

    file = tmp_path / "train.jsonl"
    file.write_text('{"id": 1, "q": "a"}\n\n{"id": 1, "q": null}\n{"id": 1, "q": "\u2028", "more": 1}\n')
    assert [t["id"] for t in read_tasks(file)] == [1, 1, 1]
    optional = ['{"q": 1, "hint": 2}', '{"q": 1}', '{"q": 1}', '{"q": 1, "hint": 2}']
    file.write_text("\n".join(optional))
    assert len(read_tasks(file)) == 4


# -- agents -----------------------------------------------------------------------------------------------------------


def test_agents_of_a_client() -> None:
    from agl.agents.agent import Outcome, RolloutInfo

    llm = LLM("http://h/v1", "policy", "key")
    given: Any = ({"q": "2+2"}, {"llm": llm, "limit": 3}, RolloutInfo("ro", 1))

    def by_name(task: Any, resource: Any) -> float:
        return float(resource.model_api == "http://h/v1" and resource.limit == 3 and task == {"q": "2+2"})

    def by_place(r: Any, t: Any) -> float:
        return float(r["llm"] is llm and r.model == "policy" and r.api_key == "key" and t == {"q": "2+2"})

    for agent in (client_agent(by_name), client_agent(by_place), client_agent(lambda t: 1.0)):
        assert agent.run(*given) == Outcome(1.0, 1.0)
    assert client_agent(by_place).name == "by_place"
    with pytest.raises(AttributeError, match="there is no resource 'limits'; there are 'llm'"):
        _ = RolloutResources({"llm": llm}).limits
    with pytest.raises(ConfigError, match="the resources are empty"):
        _ = RolloutResources().model_api


@pytest.mark.slow
def test_the_names_that_people_know(untrained_model: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "2+2"}\n' * 2)
    server = agl.LightningServer(
        model_path=str(untrained_model), rl_algorithm="LightningRL", dataset_path=tmp_path / "train.jsonl",
        checkpoint_dir=tmp_path / "out", batch_size=1, learning_rate=1e-5, num_epochs=1, port=0, gpus=0, group_size=2,
        max_response_tokens=8, threads=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        agl.LightningServer(model_path="m", batchsize=1)
    with pytest.raises(ConfigError, match="'gpt-4o' cannot be trained"):
        agl.LightningServer(model_path="gpt-4o")

    def agent(resource: Any, task: Any) -> float:
        from openai import OpenAI

        client = OpenAI(base_url=resource.model_api, api_key="not-used")
        said = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task.question}])
        return float(len(said.choices[0].message.content or "") % 2)

    async def both() -> Any:
        serving = asyncio.ensure_future(server.start_async())
        try:
            await until(lambda: server.url)
            client = agl.LightningClient(server_url=server.url, agent_function=agent, num_workers=2, timeout=30)
            return await asyncio.to_thread(client.run)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    result = asyncio.run(both())
    assert (result.status, len(result.rewards)) == ("succeeded", 2)
    assert Path(result.policy).is_relative_to(tmp_path / "out")
