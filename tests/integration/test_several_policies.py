"""Several policies: adapters on one base sampled in one batch, each trained on its own tokens alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sampled_rows import sampled_rows
from test_policy_process import PROMPT
from tiny_engine import tiny_model, tiny_tokenizer

from agl.errors import ConfigError, EngineError, ModelLoadError
from agl.trainer.engines.base import Request, Sampling
from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.policy import LocalPolicy, PolicySpec, start_policies


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def spec(directory: Path, name: str, **changes) -> PolicySpec:
    options = {"device": "cpu", "threads": 1, "lora": LoraSpec(rank=4), "learner": LearnerConfig(learning_rate=0.05)}
    return PolicySpec(str(directory), name, **options | changes)


async def sampled(policy: LocalPolicy, seed: int) -> tuple[list[int], np.ndarray]:
    answer = await policy.generate(Request(PROMPT, Sampling(max_tokens=12, seed=seed), session=f"s{seed}"))
    return answer.token_ids.tolist(), answer.logprobs


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def pair(runner, directory):
    """Two adapters of different shapes on one base, each trained a little, so that they differ."""

    async def start() -> dict[str, LocalPolicy]:
        policies = await start_policies(
            [spec(directory, "a"), spec(directory, "b", lora=LoraSpec(rank=2, alpha=8), seed=1)]
        )
        await policies["a"].train(await sampled_rows(policies["a"], PROMPT, (-1.0, 1.0, -1.0, 1.0)))
        await policies["b"].train(await sampled_rows(policies["b"], PROMPT, (-1.0, 1.0, -1.0, 1.0), 10))
        await policies["b"].train(await sampled_rows(policies["b"], PROMPT, (-1.0, 1.0, -1.0, 1.0), 20))
        return policies

    policies = runner.run(start())
    yield policies
    runner.run(policies["a"].close())


def test_they_share_a_process_and_count_their_own_versions_and_parameters(pair):
    a, b = pair["a"], pair["b"]
    assert a.process is b.process
    assert (a.version, b.version) == (1, 2)
    assert a.info.trainable_parameters == 2 * b.info.trainable_parameters
    base = sum(p.numel() for p in tiny_model().parameters())
    assert [p.info.parameters - p.info.trainable_parameters for p in (a, b)] == [base, base]


def test_a_mixed_batch_answers_as_each_policy_alone(pair, runner):
    async def main():
        alone = {(n, s): await sampled(pair[n], s) for n in "ab" for s in range(3)}
        order = [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("b", 2), ("a", 2)]
        mixed = await asyncio.gather(*(sampled(pair[n], s) for n, s in order))
        return alone, dict(zip(order, mixed, strict=True))

    alone, mixed = runner.run(main())
    for key, (ids, logprobs) in alone.items():
        assert mixed[key][0] == ids, key
        np.testing.assert_allclose(mixed[key][1], logprobs, atol=1e-5)
    # They are different policies: the same prompt and seed has other log-probs, and their caches are not shared.
    assert not np.allclose(alone["a", 0][1][:1], alone["b", 0][1][:1], atol=1e-4)


def test_engine_and_learner_agree_on_each(pair, runner):
    async def main():
        for policy in pair.values():
            trained, served = await policy.logprobs(PROMPT), await policy.engine_logprobs(PROMPT)
            np.testing.assert_allclose(trained, served, atol=1e-5)
        return await pair["a"].logprobs(PROMPT), await pair["b"].logprobs(PROMPT)

    a, b = runner.run(main())
    assert np.abs(a - b).max() > 1e-3


def test_training_one_leaves_the_other_to_the_bit(pair, runner, tmp_path):
    async def main():
        await pair["a"].save_state(tmp_path / "a0")
        await pair["b"].save_state(tmp_path / "b0")
        made = await sampled_rows(pair["a"], PROMPT, (-1.0, 1.0, -1.0, 1.0), 30)
        await pair["b"].logprobs(PROMPT)  # so that the base model is b's when a's update comes
        await pair["a"].train(made)
        await pair["a"].save_state(tmp_path / "a1")
        await pair["b"].save_state(tmp_path / "b1")

    runner.run(main())
    states = {n: torch.load(tmp_path / n, weights_only=True) for n in ("a0", "a1", "b0", "b1")}

    def same(x: str, y: str) -> list[bool]:
        one, two = states[x]["learner"]["weights"], states[y]["learner"]["weights"]
        return [torch.equal(one[k], two[k]) for k in one]

    assert all(same("b0", "b1"))
    assert not all(same("a0", "a1"))
    assert states["b1"]["version"] == states["b0"]["version"]
    assert states["a1"]["version"] == states["a0"]["version"] + 1


def test_each_resumes_and_is_saved_as_a_model_of_its_own(pair, runner, directory, tmp_path):
    async def main():
        for name, policy in pair.items():
            await policy.save_state(tmp_path / f"{name}.pt")
            await policy.save_model(tmp_path / name)
        again = await start_policies(
            [spec(directory, "a"), spec(directory, "b", lora=LoraSpec(rank=2, alpha=8), seed=1)]
        )
        whole = await start_policies([spec(tmp_path / name, name, lora=None) for name in "ab"])
        try:
            assert whole["a"].process is not whole["b"].process
            for name, policy in again.items():
                await policy.load_state(tmp_path / f"{name}.pt")
                assert policy.version == pair[name].version
                expected = await pair[name].logprobs(PROMPT)
                np.testing.assert_array_equal(await policy.logprobs(PROMPT), expected)
                np.testing.assert_allclose(await whole[name].logprobs(PROMPT), expected, atol=1e-4)
        finally:
            for policy in (again["a"], *whole.values()):
                await policy.close()

    runner.run(main())
    adapter = load_file(tmp_path / "b" / "adapter" / "adapter_model.safetensors")
    assert {min(t.shape) for t in adapter.values()} == {2}


def test_a_row_of_another_policy_is_refused(pair, runner):
    async def main():
        made = await sampled_rows(pair["a"], PROMPT, (-1.0, 1.0), 40)
        with pytest.raises(EngineError, match="row of policy 'a' was passed to policy 'b'"):
            await pair["b"].train(made)

    runner.run(main())


def test_two_of_one_name_and_one_that_does_not_load_leave_no_process(runner, directory, tmp_path, no_process_left):
    with pytest.raises(ConfigError, match="two policies are named 'a'"):
        runner.run(start_policies([spec(directory, "a"), spec(directory, "a")]))
    with pytest.raises(ModelLoadError):
        runner.run(start_policies([spec(directory, "a"), spec(tmp_path / "missing", "b")]))
