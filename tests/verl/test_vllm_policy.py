"""A policy that a real `vllm serve` holds, where a user meets it: `agl.Baseline`, `agl run` and `agl serve`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import threading
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from launching import environment, facts, launch
from processes import AGL, fetch, programs
from vllm_server import VLLMServer

import agl
from agl.errors import ConfigError, ModelLoadError
from agl.mdp.types import Call
from agl.testing.provider import Reply, serve
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer
from agl.trainer.store import open_store
from agl.trainer.store.types import NewRollout

SECONDS = 120.0

pytestmark = pytest.mark.night

AGENT = """
import agl
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import exact_answer

agent = agl.wrap(build_agent(), reward=exact_answer)
"""


@pytest.fixture(scope="module")
def server(tiny_policy, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    options = ("--max-model-len", 256, "--logprobs-mode", "processed_logprobs")
    server = VLLMServer(tiny_policy, log, *options)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


class Tap:
    """An HTTP server in front of another one that keeps what passes `/v1/completions`."""

    def __init__(self, url: str) -> None:
        tap, self.passed = self, []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {"content-type": "application/json"}
                with urllib.request.urlopen(urllib.request.Request(url + self.path, body, headers)) as answer:
                    data = answer.read()
                if self.path == "/v1/completions":
                    tap.passed.append((json.loads(body), json.loads(data)["choices"][0]))
                self.send(data)

            def do_GET(self) -> None:
                with urllib.request.urlopen(url + self.path) as answer:
                    self.send(answer.read())

            def send(self, data: bytes) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


async def calls_of(url: str, **which) -> list[Call]:
    store = await open_store(url)
    try:
        return [
            call
            for rollout in await store.query_rollouts(**which)
            for call in await store.query_calls(rollout.rollout_id, rollout.attempts)
        ]
    finally:
        await store.close()


def test_a_langchain_agent_is_evaluated_and_its_tokens_are_the_servers(server, tmp_path: Path):
    heldout = arithmetic_tasks(48, seed=0, split="heldout")
    with Tap(server.url) as tap:
        trainer = agl.Trainer(
            agl.Baseline(engine=agl.VLLMEngine(tap.url)), n_workers=16, directory=tmp_path / "run", progress=False
        )
        result = trainer.fit(agl.wrap(build_agent(), reward=exact_answer), heldout[:4], heldout)
    (entry,) = result.history
    # The quickstart's policy before training: about a quarter.
    assert 0.05 < entry["val/reward"] < 0.6
    assert entry["val/failed_rollouts"] == 0
    assert entry["train/reward"] in (0, 0.25, 0.5, 0.75, 1)
    calls = asyncio.run(calls_of(result.store))
    assert {call.agent for call in calls} == {"solver"}
    assert any(call.parent_id is not None for call in calls)

    def known(prompt, ids, logprobs):
        return (tuple(prompt), tuple(ids), tuple(f"{p:.5f}" for p in logprobs))

    # The first two requests ask which log-probs it reports.
    of_server = Counter(
        known(body["prompt"], choice["token_ids"], choice["logprobs"]["token_logprobs"])
        for body, choice in tap.passed[2:]
    )
    assert of_server == Counter(
        known(c.prompt_ids.tolist(), c.response_ids.tolist(), c.logprobs.tolist()) for c in calls
    )
    assert {body["temperature"] for body, _ in tap.passed[2:]} == {1.0}


def test_a_model_is_evaluated_here(tiny_policy, tmp_path: Path):
    heldout = arithmetic_tasks(32, seed=0, split="heldout")
    trainer = agl.Trainer(
        agl.Baseline(model=str(tiny_policy)), n_workers=16, directory=tmp_path / "run", progress=False
    )
    result = trainer.fit(agl.wrap(build_agent(), reward=exact_answer), heldout)
    assert 0.05 < result.history[0]["train/reward"] < 0.6
    assert {call.policy for call in asyncio.run(calls_of(result.store))} == {"policy"}


def number(task: object, output: object) -> float:
    """The number that was answered, which differs more often than whether it is right."""
    digits = re.findall(r"\d", str(output))
    return float("".join(digits) or -1)


def test_evaluate_measures_a_server_as_it_does_the_same_model_here(server, tiny_policy, tmp_path: Path):
    policies = {"server": agl.VLLMEngine(server.url), "here": str(tiny_policy)}
    evaluation = agl.evaluate(
        agl.wrap(build_agent(), reward=number), arithmetic_tasks(24, seed=0, split="heldout"), policies,
        temperature=0.0, max_response_tokens=48, n_workers=16, directory=tmp_path / "evaluation", progress=False,
    )  # fmt: skip
    served, here = evaluation.policies.values()
    assert len({r.reward for r in served.rollouts}) > 1
    assert [(r.task, r.reward) for r in served.rollouts] == [(r.task, r.reward) for r in here.rollouts]


def test_another_models_tokenizer_is_refused(server, tmp_path: Path):
    from engine_suite import write_suite_model

    other = write_suite_model(tmp_path / "other")
    agent = agl.wrap(build_agent(), reward=exact_answer)

    def fails(algorithm: agl.Baseline, error: type[Exception], message: str, **options) -> None:
        trainer = agl.Trainer(algorithm, directory=tmp_path / "run", progress=False, **options)
        with pytest.raises(error, match=message):
            trainer.fit(agent, arithmetic_tasks(1, seed=0, split="train"))

    engine = agl.VLLMEngine(server.url)
    fails(agl.Baseline(engine=engine, model=str(other)), ConfigError, "a different tokenizer")
    fails(agl.Baseline(engine=engine, model=str(tmp_path / "none")), ModelLoadError, "none")
    fails(agl.Baseline(engine={"a": engine}), ConfigError, "'a'|'policy'")
    with pytest.raises(ConfigError, match="VLLMEngine"):
        agl.Baseline(engine=server.url)


def test_agl_run_lets_it_answer_a_program(server, tmp_path: Path):
    program = tmp_path / "ask.py"
    program.write_text("""
from openai import OpenAI
messages = [{"role": "user", "content": "What is 2 * 3?"}]
answer = OpenAI().chat.completions.create(model="m", messages=messages, max_tokens=8)
print(answer.usage.completion_tokens, answer.choices[0].finish_reason)
""")
    with serve(lambda body: Reply("the provider's own")) as provider:
        words = ("--engine", server.url, "--store", "run.db", "--", sys.executable, program)
        done = launch(tmp_path, environment(provider), *words)
        assert done.returncode == 0, done.stderr
        assert provider.seen == []
    assert facts(tmp_path)["status"] == "succeeded"
    (call,) = asyncio.run(calls_of(str(tmp_path / "run.db")))
    assert done.stdout.split() == [str(call.response_ids.size), call.finish_reason]
    assert 1 <= call.response_ids.size <= 8


def test_agl_serve_hands_it_to_runners(server, tmp_path: Path):
    (tmp_path / "mine.py").write_text(AGENT)
    with programs(tmp_path) as at:
        words = ("--engine", server.url, "--port", 0, "--json", "served.json")
        at.start(*AGL, "serve", *words, log="server.log")
        url = at.until(lambda: json.loads((tmp_path / "served.json").read_text())["url"], SECONDS, "the server")
        assert fetch(f"{url}/health")[1]["model"] == server.url
        assert "without an algorithm" in fetch(f"{url}/train", {})[1]["error"]["message"]
        at.start(*AGL, "runner", "--agent", "mine.py:agent", "--store", url, "--n-workers", 4, log="runner.log")

        async def collect() -> tuple[list[str], list[Call]]:
            store = await open_store(url)
            try:
                tasks = arithmetic_tasks(8, seed=0, split="train")
                new = [NewRollout(task=task, mode="collect", seed=i) for i, task in enumerate(tasks)]
                enqueued = [r.rollout_id for r in await store.enqueue_rollouts(new)]
                done = await store.wait_for_rollouts(enqueued, timeout=SECONDS)
                return [r.status for r in done], [c for r in enqueued for c in await store.query_calls(r)]
            finally:
                await store.close()

        statuses, calls = asyncio.run(collect())
    assert statuses == ["succeeded"] * 8
    assert len(calls) >= 8
    assert all(call.response_ids.size == call.logprobs.size > 0 for call in calls)


def test_agl_serve_does_not_train_it(tmp_path: Path):
    with programs(tmp_path) as at:
        words = ("--engine", "http://gpu:8000", "--model", "x", "--algorithm", "grpo")
        done = at.start(*AGL, "serve", *words, log="server.log")
        at.until(lambda: done.poll() is not None, SECONDS, "its end")
        assert done.returncode != 0
        assert "another server" in at.text("server.log")


def test_a_server_teaches_as_the_same_model_in_a_directory_does(server, tiny_policy, tmp_path):
    """The student is the teacher: what a server with this model says of its tokens is what the learner says."""
    students = {}
    for name, teacher in (("served", agl.VLLMEngine(server.url)), ("loaded", str(tiny_policy))):
        distill = agl.Distill(
            model=str(tiny_policy), teacher=teacher, steps=1, group_size=2, batch_size=4, max_response_tokens=48,
            max_context=200, val_every=10,
        )  # fmt: skip
        result = agl.Trainer(distill, n_workers=8, directory=tmp_path / name, progress=False).fit(
            agl.wrap(build_agent()), arithmetic_tasks(4, seed=0, split="train")
        )
        students[name] = result.history[0]
    assert students["served"]["train/calls"] == students["loaded"]["train/calls"] > 0
    assert abs(students["served"]["train/reverse_kl"]) < 1e-4
    assert students["served"]["train/reverse_kl"] == pytest.approx(students["loaded"]["train/reverse_kl"], abs=1e-4)
