"""`agl.Distill` and `agl.DPO`, end to end with a policy that nothing was taught: what is learned, recorded, resumed and
refused. That distillation makes a better agent is in tests/learning/test_distill.py."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from running import say
from safetensors.torch import load_file

import agl
from agl.errors import ConfigError, EngineError, NoTrainableDataError
from agl.mdp.sequence import merge
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.policies.policies import by_policy
from agl.trainer.policies.teacher import Teacher
from agl.trainer.report.explain import describe
from agl.trainer.store import open_store

TASKS = ["one", "two", "three"]


@agl.rollout
def talker(task: str, llm: agl.LLM) -> None:
    """Asks twice, the second time about the answer; no reward."""
    say(llm, say(llm, task) or "?")


@agl.rollout
def judged(task: str, llm: agl.LLM) -> float:
    """Asks twice; longer answers are better. They end soon: an answer that was cut off is in no pair."""
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answers = [
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": text}], stop=["e", "a", "t", " "]
        )
        for text in (task, task * 2)
    ]
    return float(sum(len(answer.choices[0].message.content or "") for answer in answers))


@pytest.fixture(scope="module")
def teacher(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(untrained_model, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


class StopAfter(agl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any, entry: Any) -> None:
        if entry["step"] == self.step:
            run.stop("enough")


def distill(model: Path, teacher: Any, **changes: Any) -> agl.Distill:
    return agl.Distill(**{
        "model": str(model), "teacher": teacher, "group_size": 2, "batch_size": 2, "steps": 2, "learning_rate": 1e-3,
        "max_response_tokens": 6, "max_context": 256,
    } | changes)  # fmt: skip


def fit(algorithm: Any, agent: Any, directory: Path, tasks: Any = TASKS, **options: Any) -> agl.Result:
    resume = options.pop("resume", False)
    trainer = agl.Trainer(algorithm, **{"n_workers": 4, "directory": directory, "progress": False, **options})
    return trainer.fit(agent, tasks, resume=resume)


def reports(result: agl.Result, mode: Any = "train") -> list[Any]:
    async def main() -> list[Any]:
        store = await open_store(result.store)
        try:
            return [await describe(store, r.rollout_id) for r in await store.query_rollouts(mode=mode)]
        finally:
            await store.close()

    return asyncio.run(main())


def same_weights(a: agl.Result, b: agl.Result) -> bool:
    one, two = (load_file(r.policies["policy"] / "model.safetensors") for r in (a, b))
    return all(torch.equal(one[name], two[name]) for name in one)


# -- distillation -----------------------------------------------------------------------------------------------------


def test_each_call_is_recorded_with_the_mean_of_its_tokens_advantages(
    untrained_model: Path, teacher: Path, tmp_path: Path, no_process_left: None
) -> None:
    """Computed again here: the teacher's log-probs of what was sampled, less the student's."""
    from transformers import AutoModelForCausalLM

    result = fit(distill(untrained_model, teacher, steps=1), talker, tmp_path)
    (entry,) = result.history
    assert (entry["train/rollouts"], entry["train/failed_rollouts"], entry["policy_version"]) == (4, 0, 1)
    assert entry["learner/abs_log_ratio"] < 1e-3
    assert "train/reward" not in entry
    model = AutoModelForCausalLM.from_pretrained(teacher)

    async def calls() -> list[Any]:
        store = await open_store(result.store)
        try:
            rollouts = await store.query_rollouts(mode="train")
            return [
                (call, {t.call_id: t for t in await store.query_trained_calls(r.rollout_id)}[call.id])
                for r in rollouts
                for call in await store.query_calls(r.rollout_id)
            ]
        finally:
            await store.close()

    advantages = []
    for call, trained in asyncio.run(calls()):
        ids = torch.from_numpy(call.ids.astype(np.int64))
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
        advantages.append(logprobs[call.prompt_ids.size - 1 :] - call.logprobs)
        assert trained.advantage == pytest.approx(advantages[-1].mean(), abs=1e-4)
        assert trained.tokens == call.response_ids.size
    assert len(advantages) == 8
    assert entry["train/reverse_kl"] == pytest.approx(-np.concatenate(advantages).mean(), abs=1e-4)
    assert "advantage" in str(reports(result)[0].to_json())


@pytest.mark.night  # test_imitation.py resumes a run of the same loop
def test_a_resumed_distillation_equals_one_never_stopped(untrained_model: Path, teacher: Path, tmp_path: Path) -> None:
    algorithm = distill(untrained_model, teacher, steps=3, max_staleness=1)
    whole = fit(algorithm, talker, tmp_path / "whole", n_workers=1)
    stopped = fit(algorithm, talker, tmp_path / "stopped", n_workers=1, callbacks=StopAfter(1))
    assert stopped.stop_reason == "enough"
    resumed = fit(algorithm, talker, tmp_path / "stopped", n_workers=1, resume=True)
    assert [e["train/reverse_kl"] for e in resumed.history] == [e["train/reverse_kl"] for e in whole.history]
    assert same_weights(whole, resumed)


def test_two_policies_with_adapters_have_a_teacher_each(untrained_model: Path, teacher: Path, tmp_path: Path) -> None:
    """One is its own teacher, and finds nothing to learn."""

    from agents import Agent, OpenAIProvider, Runner

    from agl.adapters.openai_agents import OpenAIAgentsTracer

    provider = OpenAIProvider(base_url="http://provider.invalid/v1", api_key="sk-nobody", use_responses=False)
    left, right = (Agent(name=name, instructions=name, model=provider.get_model("m")) for name in ("left", "right"))

    @agl.rollout
    async def both(task: str) -> None:
        await Runner.run(left, task)
        await Runner.run(right, task)

    algorithm = distill(
        untrained_model, {"left": teacher, "right": untrained_model}, steps=2, lora=agl.LoraSpec(rank=2)
    )
    result = fit(algorithm, both, tmp_path, agents={"left": "left", "right": "right"}, tracer=OpenAIAgentsTracer())
    assert result.history[0]["left/train/reverse_kl"] > 0.01
    assert abs(result.history[0]["right/train/reverse_kl"]) < 1e-4
    assert set(result.policies) == {"left", "right"}


@contextmanager
def served(model: Path, *, tokens: int = 0, context: int = 512) -> Iterator[str]:
    """What a `vllm serve` of the model answers to a teacher's questions: its token ids and prompt log-probs. `tokens`
    are added to each tokenised text, so that it is another tokenizer's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)

    def logprobs(ids: list[int]) -> list[Any]:
        with torch.no_grad():
            values = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [None, *({str(i): {"logprob": float(values[t, i])}} for t, i in enumerate(ids[1:]))]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "m", "root": str(model), "max_model_len": context}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/tokenize":
                ids = tokenizer.encode(body["prompt"], add_special_tokens=False)
                return self.answer({"tokens": ids + [0] * tokens})
            choice = {"index": 0, "prompt_logprobs": logprobs(body["prompt"]), "finish_reason": "length"}
            self.answer({"choices": [choice]})

        def answer(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_is_the_same_teacher_as_its_directory(untrained_model: Path, teacher: Path) -> None:
    """On rows that are trees of several calls, and one that was not whole."""
    from call_trees import random_calls, trajectory

    rows = []
    for name in ("a", "b", "c"):
        t = trajectory(random_calls(np.random.default_rng(ord(name)), 6, rollout=name), name)
        rows += merge(t, {x.call.id: 0.0 for x in t.transitions})
    assert not all(row.is_chain for row in rows)

    async def main(url: str) -> list[Any]:
        student = await LocalPolicy.start(PolicySpec(str(untrained_model), max_context=256))
        found = []
        for kind in (str(teacher), agl.VLLMEngine(url)):
            judge = await Teacher.start(kind, student, PolicySpec(""))
            at_one = [row for row in rows if (row.temperatures == 1).all()]
            found.append(await judge.logprobs(at_one))
            await judge.close()
        await student.close()
        return found

    with served(teacher) as url:
        local, remote = asyncio.run(main(url))
    for a, b in zip(local, remote, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert any((a != 0).any() for a in local)


@pytest.mark.night
def test_a_run_with_a_server_as_teacher(untrained_model: Path, teacher: Path, tmp_path: Path) -> None:
    local = fit(distill(untrained_model, teacher, steps=1), talker, tmp_path / "local", n_workers=1)
    with served(teacher) as url:
        engine = agl.VLLMEngine(url)
        remote = fit(distill(untrained_model, engine, steps=1), talker, tmp_path / "remote", n_workers=1)
    key = "train/reverse_kl"
    assert remote.history[0][key] == pytest.approx(local.history[0][key], abs=1e-4)
    with pytest.raises(EngineError, match="cannot be reached"):
        fit(distill(untrained_model, agl.VLLMEngine(url), steps=1), talker, tmp_path / "gone")


def test_teachers_with_other_tokens_are_refused(
    untrained_model: Path, teacher: Path, tmp_path: Path, no_process_left: None
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = (next(token for token, i in vocabulary.items() if i == k) for k in (300, 301))
    vocabulary[a], vocabulary[b] = 301, 300
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=r"a different tokenizer from the student .*: 2 of \d+ tokens are others"
    ) as refused:
        fit(distill(untrained_model, other), talker, tmp_path / "run")
    assert "agl.SFT" in str(refused.value.hint)

    with served(teacher, tokens=1) as url, pytest.raises(ConfigError, match="a probe text is"):
        fit(distill(untrained_model, agl.VLLMEngine(url)), talker, tmp_path / "run2")
    with served(teacher, context=256) as url, pytest.raises(ConfigError, match="reads 256 tokens at most") as short:
        fit(distill(untrained_model, agl.VLLMEngine(url)), talker, tmp_path / "run3")
    assert "max_context=255" in str(short.value.hint)


def test_settings_of_distillation_that_cannot_be_meant() -> None:
    with pytest.raises(ConfigError, match="on_policy") as refused:
        agl.Distill(model="m", teacher="t", steps=1, on_policy=False)
    assert "agl.SFT" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="teacher= is 3"):
        agl.Distill(model="m", teacher=3, steps=1)
    with pytest.raises(ConfigError, match=r"temperature=0\.7"):
        agl.Distill(model="m", teacher=agl.VLLMEngine("http://gpu:8000"), steps=1, temperature=0.7)
    with pytest.raises(ConfigError, match="teacher= has 'b', to which no agent is sent"):
        by_policy("teacher", {"a": "t", "b": "t"}, ["a"])


# -- preference pairs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with six rollouts of each of three tasks."""
    directory = tmp_path_factory.mktemp("recorded")
    algorithm = agl.GRPO(
        model=str(untrained_model), group_size=6, batch_size=3, steps=1, max_response_tokens=24, max_context=256
    )
    fit(algorithm, judged, directory)
    return directory


def dpo(model: Path, **changes: Any) -> agl.DPO:
    return agl.DPO(**{
        "model": str(model), "learning_rate": 1e-3, "max_response_tokens": 24, "max_context": 256,
    } | changes)  # fmt: skip


def test_the_chosen_side_of_recorded_pairs_wins(
    untrained_model: Path, recorded: Path, tmp_path: Path, no_process_left: None
) -> None:
    data = agl.traces(recorded, per_task=2)
    result = fit(dpo(untrained_model, data=data, epochs=5, batch_size=3), None, tmp_path, tasks=())
    first, last = result.history[0], result.history[-1]
    assert len(result.history) == 10  # six pairs
    assert first["learner/reward_margin"] == pytest.approx(0, abs=1e-6)
    assert last["learner/reward_accuracy"] == 1.0
    assert last["learner/reward_margin"] > 0.1
    assert last["learner/loss"] < first["learner/loss"]
    assert last["learner/chosen_reward"] > last["learner/rejected_reward"]
    assert first["train/calls"] == 12  # three pairs of rollouts with two calls each


def test_resumed_preference_pairs_have_the_reference_that_training_began_with(
    untrained_model: Path, recorded: Path, tmp_path: Path
) -> None:
    algorithm = dpo(untrained_model, data=agl.traces(recorded), steps=4, lora=agl.LoraSpec(rank=2, dropout=0.1))
    whole = fit(algorithm, None, tmp_path / "whole", tasks=())
    fit(algorithm, None, tmp_path / "stopped", tasks=(), callbacks=StopAfter(2))
    resumed = fit(algorithm, None, tmp_path / "stopped", tasks=(), resume=True)
    names = ("learner/loss", "learner/reward_margin", "learner/grad_norm")
    assert [[e[n] for n in names] for e in resumed.history] == [[e[n] for n in names] for e in whole.history]
    assert whole.history[-1]["learner/reward_margin"] > 0


def test_pairs_of_what_was_just_sampled(untrained_model: Path, tmp_path: Path) -> None:
    algorithm = dpo(untrained_model, group_size=4, batch_size=2, steps=2)
    result = fit(algorithm, judged, tmp_path)
    assert [e["policy_version"] for e in result.history] == [1, 2]
    assert result.history[0]["learner/loss"] == pytest.approx(np.log(2), rel=1e-4)
    signs = [(r.total_reward, {c.trained.advantage for c in r.calls if c.trained}) for r in reports(result)]
    assert {s for _, signs_ in signs for s in signs_} <= {1.0, -1.0, 0.0}
    assert np.mean([r for r, s in signs if s == {1.0}]) > np.mean([r for r, s in signs if s == {-1.0}])


def test_steps_without_a_pair_go_by_without_an_update(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @agl.rollout
    def equal(task: str, llm: agl.LLM) -> float:
        say(llm, task)
        return 1.0

    result = fit(dpo(untrained_model, group_size=2, batch_size=1, steps=1), equal, tmp_path, progress=True)
    assert result.history[0]["policy_version"] == 0
    assert "step 1: no update: no two rollouts of a task make a pair" in capsys.readouterr().err


def test_data_without_a_pair_and_settings_that_cannot_be_meant(
    untrained_model: Path, recorded: Path, tmp_path: Path
) -> None:
    with pytest.raises(NoTrainableDataError, match="no two of 18 rollouts of 3 tasks make a pair"):
        fit(dpo(untrained_model, data=agl.traces(recorded), margin=1e6, steps=1), None, tmp_path, tasks=())
    with pytest.raises(ConfigError, match="takes no weights"):
        dpo(untrained_model, data=agl.traces(recorded, weight=agl.reward()), steps=1)
    with pytest.raises(ConfigError, match="group_size is 1"):
        dpo(untrained_model, group_size=1, steps=1)
    with pytest.raises(ConfigError, match="mean over pairs"):
        dpo(untrained_model, loss_agg="seq-mean-token-sum", steps=1)
    with pytest.raises(ConfigError, match="beta"):
        dpo(untrained_model, beta=0.0, steps=1)
