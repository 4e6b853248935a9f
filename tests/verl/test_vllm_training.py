"""`engine="vllm"`: one machine's learner trains what a real vLLM samples."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from paths import pythonpath
from running import gone
from sampled_rows import sampled_rows
from schema_agent import structured
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_training import train

import agl
from agl.adapters.langchain import wrap
from agl.errors import ConfigError, EngineError
from agl.mdp.types import Call, FloatArray
from agl.trainer.engines.base import Request, Sampling
from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.policy import LocalPolicy, PolicySpec, start_policies
from agl.trainer.local.prepared import CACHE_VARIABLE, model_directory
from agl.trainer.local.tokenizer import load_config
from agl.trainer.policies.vllm import VLLMPolicy, with_vllm
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer
from agl.trainer.store import open_store

pytestmark = pytest.mark.slow
PROMPT = np.int32([1, 60, 61, 62, 63])
EXACT = 1e-4


def test_two_steps_by_what_was_just_trained_and_a_resume_after_a_kill(tiny_policy: Path, tmp_path: Path) -> None:
    program = Path(__file__).parent / "vllm_training.py"
    killed = subprocess.run(
        [sys.executable, program, tiny_policy, tmp_path], stdout=subprocess.PIPE, text=True, timeout=500,
        env={**os.environ, "PYTHONPATH": pythonpath()},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    folder, *children = killed.stdout.split()
    assert len(children) >= 3, "the learner, vLLM's server and its engine"
    assert all(gone(int(pid)) for pid in children)
    assert not Path(folder).exists()

    result = train(tiny_policy, tmp_path, resume=True)
    assert [entry["step"] for entry in result.history] == [1, 2]
    assert all(entry["train/failed_rollouts"] == 0 for entry in result.history)

    calls = asyncio.run(calls_of(result.store))
    weights = {0: tiny_policy, 1: tmp_path / "checkpoints" / "step-000001" / "policy"}
    assert {call.policy_version for call in calls} == set(weights)
    for version, directory in weights.items():
        sampled = [call for call in calls if call.policy_version == version][:16]
        for folder, close in ((directory, True), (weights[1 - version], False)):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            difference = max(float(np.abs(logprobs(model, call) - call.logprobs).max()) for call in sampled)
            assert (difference < EXACT) is close, (version, folder, difference)
    assert result.policy is not None


def test_answers_within_a_schema_are_trained_as_they_were_sampled(tiny_policy: Path, tmp_path: Path) -> None:
    """As JSON, as a forced call and as a call of a strict tool: vLLM hides what the learner hides."""
    algorithm = agl.GRPO(
        model=str(tiny_policy), engine="vllm", device="cpu", threads=1, group_size=4, batch_size=8, steps=2,
        learning_rate=1e-3, max_response_tokens=60, max_context=256,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=16, directory=tmp_path, progress=False, max_attempts=1)
    result = trainer.fit(structured, arithmetic_tasks(64, seed=0, split="train"))
    assert all(entry["train/failed_rollouts"] == 0 for entry in result.history)
    ratios = [value for entry in result.history for key, value in entry.items() if key.endswith("abs_log_ratio")]
    assert ratios
    assert max(ratios) < EXACT
    calls = asyncio.run(calls_of(result.store))
    assert all(call.grammar for call in calls)
    assert {bool(call.tool_call_ids) for call in calls} == {True, False}
    assert sum(int((call.logprobs == 0).sum()) for call in calls) > 500, "no token was forced"


@pytest.mark.night
def test_the_next_step_is_sampled_while_one_is_learned(tiny_policy: Path, tmp_path: Path) -> None:
    before = sockets()
    result = train(tiny_policy, tmp_path, max_staleness=1)
    assert sockets() <= before
    assert [entry["step"] for entry in result.history] == [1, 2]
    calls = asyncio.run(calls_of(result.store))
    assert {call.policy_version for call in calls} == {0}
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    assert max(float(np.abs(logprobs(model, call) - call.logprobs).max()) for call in calls) < EXACT


@pytest.mark.night
def test_adapters_on_one_model_share_a_server_whose_death_is_told(tiny_policy: Path) -> None:
    spec = PolicySpec(
        str(tiny_policy), device="cpu", threads=1, max_context=64, lora=LoraSpec(rank=4),
        learner=LearnerConfig(learning_rate=0.02),
    )  # fmt: skip

    async def scenario() -> None:
        local = await start_policies([replace(spec, name="a"), replace(spec, name="b")])
        try:
            policies = await with_vllm(local)
            a, b = policies.values()
            assert isinstance(a, VLLMPolicy)
            assert isinstance(b, VLLMPolicy)
            assert a.server is b.server
            died = asyncio.get_running_loop().create_future()
            a.server.on_death(died.set_result)
            try:
                before = await served(a)
                for version in (1, 2):
                    await a.train(await sampled_rows(a, PROMPT, (-1.0, 1.0, -1.0, 1.0)))
                    assert (await a.generate(Request(PROMPT, Sampling(max_tokens=8)))).policy_version == version - 1
                    await a.publish()
                    assert a.version == version
                    answer = await a.generate(Request(PROMPT, Sampling(max_tokens=8, seed=5)))
                    assert answer.policy_version == version
                    ids = np.concatenate([PROMPT, answer.token_ids])
                    learners = await a.logprobs(ids)
                    np.testing.assert_allclose(answer.logprobs, learners[PROMPT.size - 1 :], atol=EXACT)
                    np.testing.assert_allclose(await a.engine_logprobs(ids), learners, atol=EXACT)
                assert np.abs(await served(a) - before).max() > 0.01
                np.testing.assert_array_equal(await served(b), before)
                assert [path.name for path in a.server._folder.iterdir() if path.is_dir()] == ["a-2"]

                os.kill(a.server._child.process.pid, signal.SIGKILL)
                with pytest.raises(EngineError):
                    await b.generate(Request(PROMPT, Sampling(max_tokens=8)))
                with pytest.raises(EngineError, match=r"(?s)vLLM died.*its last output was:\n.+"):
                    await a.server.load_model(Path("nothing"))
                error = await asyncio.wait_for(died, 60)
                assert "vLLM died (exit code -9)" in str(error)
            finally:
                await a.server.close()
            assert not a.server._folder.exists()
        finally:
            await local["a"].close()

    asyncio.run(scenario())


@pytest.mark.night
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "lm_head")])
def test_an_adapter_that_changes_embeddings_reaches_vllm_as_all_weights(
    targets: str | tuple[str, ...], tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of tokens that a chat template added, and LoRA on an output layer with its own weights."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    if model.config.tie_word_embeddings:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    base = tmp_path / "base"
    model.save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_policy).save_pretrained(base)
    spec = PolicySpec(
        model_directory(base, "llama3"), device="cpu", threads=1, max_context=64,
        lora=LoraSpec(rank=4, target_modules=targets), learner=LearnerConfig(learning_rate=0.02),
    )  # fmt: skip

    async def scenario() -> None:
        local = await start_policies([spec])
        try:
            (policy,) = (await with_vllm(local)).values()
            assert isinstance(policy, VLLMPolicy)
            try:
                added = load_config(spec.model).agl_added_tokens
                ids = np.int32([1, 60, 61, *added, 70, *added])
                before = await policy.engine_logprobs(ids)
                for version in (1, 2):
                    await policy.train(await sampled_rows(policy, PROMPT, (-1.0, 1.0, -1.0, 1.0)))
                    await policy.publish()
                    assert policy.version == version
                    answer = await policy.generate(Request(PROMPT, Sampling(max_tokens=8, seed=5)))
                    assert answer.policy_version == version
                    learners = await policy.logprobs(np.concatenate([PROMPT, answer.token_ids]))
                    np.testing.assert_allclose(answer.logprobs, learners[PROMPT.size - 1 :], atol=EXACT)
                    np.testing.assert_allclose(
                        await policy.engine_logprobs(ids), await policy.logprobs(ids), atol=EXACT
                    )
                assert np.abs(await policy.engine_logprobs(ids) - before).max() > 0.01
            finally:
                await policy.server.close()
        finally:
            await local["policy"].close()

    asyncio.run(scenario())


def test_several_whole_models_are_refused_before_any_starts(tiny_policy: Path, tmp_path: Path) -> None:
    algorithm = agl.GRPO(model=str(tiny_policy), engine="vllm", device="cpu", threads=1, steps=1)
    trainer = agl.Trainer(algorithm, agents={"x": "a", "y": "b"}, directory=tmp_path, progress=False)
    with pytest.raises(ConfigError, match=r"(?s)serves one model.*LoRA"):
        trainer.fit(wrap(build_agent(), reward=exact_answer), arithmetic_tasks(4, seed=0, split="train"))


def sockets() -> set[Path]:
    """Where vLLM would leave its own."""
    return {path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()}


async def calls_of(url: str) -> list[Call]:
    store = await open_store(url)
    try:
        rollouts = await store.query_rollouts()
        return [call for r in rollouts for call in await store.query_calls(r.rollout_id, r.attempts)]
    finally:
        await store.close()


def logprobs(model: Any, call: Call) -> FloatArray:
    """float32 [R] of a call's response."""
    ids = torch.from_numpy(np.concatenate([call.prompt_ids, call.response_ids]).astype(np.int64))
    with torch.no_grad():
        distribution = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
    return distribution.gather(1, ids[1:, None])[call.prompt_ids.size - 1 :, 0].numpy()


async def served(policy: LocalPolicy) -> FloatArray:
    return await policy.engine_logprobs(np.int32([1, 60, 61, 70, 71, 72]))
