"""`quantize=`: LoRA on a base in 4 or 8 bits (bitsandbytes, on the CPU) is exact for the policy that it samples."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampled_rows import sampled_rows
from tiny_engine import tiny_model, tiny_tokenizer
from tiny_learner import gradients
from transformers import AutoModelForCausalLM

import agl
from agl.errors import ModelLoadError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import int_array
from agl.trainer.engines.base import Request, Sampling
from agl.trainer.local import memory
from agl.trainer.local.config import LearnerConfig, LoraSpec, Quantize
from agl.trainer.local.engine.engine import LocalEngine
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.learner.prefix_trees import chain
from agl.trainer.local.lora import Adapters
from agl.trainer.local.model import LoadedPolicy, load_policy, save_model
from agl.trainer.local.policy import PolicySpec, start_policies
from agl.trainer.local.worker import served_copy

torch.set_num_threads(1)

CPU = torch.device("cpu")
IDS = np.random.default_rng(0).integers(1, 272, 60).astype(np.int32)
LORA = LoraSpec(rank=4)
CONFIG = LearnerConfig(learning_rate=1e-2)
both = pytest.mark.parametrize("quantize", ["4bit", "8bit"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights; 100 is no multiple of NF4's blocks."""
    path = tmp_path_factory.mktemp("base")
    tiny_model(hidden_size=64, intermediate_size=100, initializer_range=0.1).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def load(directory: Path, quantize: Quantize | None) -> tuple[LoadedPolicy, Learner, LocalEngine]:
    """The policy with an adapter that changes something, its learner and its engine."""
    policy = load_policy(directory, device="cpu", quantize=quantize, lora=LORA)
    adapters = Adapters(policy.model, {"policy": policy.adapters[0]})
    learner = Learner(policy.model, CONFIG, CPU, lambda: adapters.use("policy"))
    torch.manual_seed(1)
    for weight in learner._trained.values():
        torch.nn.init.normal_(weight, std=0.1)
    return policy, learner, LocalEngine(policy.model, policy.tokenizer, device=CPU, max_context=512, adapters=adapters)


def rows() -> list[TrainingRow]:
    mask = np.arange(IDS.size) >= 40
    filled = {"logprobs": np.where(mask, -3, 0), "advantages": mask}
    arrays = {name: value.astype(np.float32) for name, value in filled.items()}
    row = replace(
        chain(int_array(IDS)),
        rollout_id="r",
        call_ids=("r/0",),
        action_mask=mask,
        calls=np.where(mask, 0, -1),
        **arrays,
    )
    return [row]


def with_rounded_weights(policy: LoadedPolicy, plain: LoadedPolicy) -> None:
    """Give the plain policy the weights that the quantised one stands for, and its adapter."""
    from bitsandbytes.functional import dequantize_4bit

    targets = dict(plain.model.named_parameters())
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if (state := getattr(weight, "quant_state", None)) is not None:
                weight = dequantize_4bit(weight.data, state)
            elif (scales := getattr(weight, "SCB", None)) is not None:
                weight = weight.data * (scales / 127)[:, None]
            targets[name].copy_(weight)


@both
def test_an_update_is_that_of_the_rounded_weights_and_moves_the_adapter_alone(
    quantize: Quantize, directory: Path
) -> None:
    policy, learner, engine = load(directory, quantize)
    plain, reference, _ = load(directory, None)
    with_rounded_weights(policy, plain)
    frozen = {n: p.detach().clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    np.testing.assert_allclose(learner.logprobs(IDS), reference.logprobs(IDS), atol=1e-4)
    np.testing.assert_allclose(engine.logprobs(IDS), learner.logprobs(IDS), atol=1e-4)

    expected, found = (gradients(subject, rows())[1] for subject in (reference, learner))
    assert found.keys() == expected.keys() == learner._trained.keys()
    assert all("lora_" in name for name in found)
    for name, gradient in found.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3)

    before = learner.logprobs(IDS)
    learner.update(rows())
    assert np.abs(learner.logprobs(IDS) - before).max() > 1e-3
    np.testing.assert_allclose(engine.logprobs(IDS), learner.logprobs(IDS), atol=1e-4)
    assert {p.dtype for p in learner._trained.values()} == {torch.float32}
    for name, weight in policy.model.named_parameters():
        if name in frozen:
            assert torch.equal(weight, frozen[name]), name


@both
def test_a_row_does_not_depend_on_the_others_of_its_batch(quantize: Quantize, directory: Path) -> None:
    """LLM.int8() would compute the columns in which any row has an outlier in another way."""
    model = load(directory, quantize)[0].model.get_base_model()
    layer = model.model.layers[0].mlp.up_proj
    torch.manual_seed(0)
    quiet = torch.randn(1, 5, 64)
    loud = 30 * torch.randn(1, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(layer(torch.cat([quiet, loud]))[:1], layer(quiet), atol=1e-5, rtol=1e-5)


@both
def test_its_weights_take_what_the_formula_says(quantize: Quantize, directory: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(directory)
    policy = load_policy(directory, device="cpu", quantize=quantize, lora=LORA)
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    adapter = sum(16 * p.numel() for p in policy.model.parameters() if p.requires_grad)
    shapes = memory.model_of_shapes(base.config)
    needed = memory.base_bytes(shapes, memory.FLOAT32, quantize)
    assert memory.training_bytes(policy.model) - adapter == needed
    assert sum(map(memory.n_weights, frozen)) == base.num_parameters()
    whole = memory.base_bytes(shapes, memory.FLOAT32)
    linear = sum(m.weight.numel() for m in memory.adapted_layers(shapes))
    bits = {"4bit": 4 + 8 / 64 + 32 / (64 * 256), "8bit": 8 + 32 / 64}[quantize]
    assert whole - needed == pytest.approx((32 - bits) / 8 * linear, rel=0.01)


@both
def test_a_copy_to_sample_from_shares_the_base(quantize: Quantize, directory: Path) -> None:
    model = load(directory, quantize)[0].model
    served = dict(served_copy(model).named_parameters())
    assert all((served[name] is weight) != ("lora_" in name) for name, weight in model.named_parameters())


@both
def test_what_is_saved_are_the_original_weights_with_the_adapter(
    quantize: Quantize, directory: Path, tmp_path: Path
) -> None:
    policy, learner, _ = load(directory, quantize)
    save_model(policy, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    saved, original = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path, directory))
    plain = load(directory, None)[0]
    expected = plain.model.merge_and_unload().state_dict()
    for name, weight in saved.state_dict().items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=1e-6)

    def logprobs(model: Any) -> np.ndarray:
        return Learner(copy.deepcopy(model), CONFIG, CPU).logprobs(IDS)

    # It differs from what was trained by what quantisation changes.
    with policy.model.disable_adapter():
        rounding = np.abs(learner.logprobs(IDS) - logprobs(original)).mean()
    assert np.abs(logprobs(saved) - learner.logprobs(IDS)).mean() < 2 * rounding
    assert rounding < {"4bit": 0.5, "8bit": 0.05}[quantize]


@pytest.mark.parametrize("quantize", ["4bit", pytest.param("8bit", marks=pytest.mark.slow)])
def test_two_adapters_on_one_base_resume_to_the_bit(quantize: Quantize, directory: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = dict(device="cpu", threads=1, learner=CONFIG, quantize=quantize)
    specs = [
        PolicySpec(str(directory), "a", lora=LORA, **common),
        PolicySpec(str(directory), "b", lora=LoraSpec(rank=2), seed=1, **common),
    ]

    async def answers(policies: Any, order: str) -> list[list[int]]:
        made = [policies[n].generate(Request(IDS, Sampling(max_tokens=8, seed=i))) for i, n in enumerate(order)]
        return [answer.token_ids.tolist() for answer in await asyncio.gather(*made)]

    async def main() -> None:
        policies = await start_policies(specs)
        a, b = policies.values()
        try:
            assert a.process is b.process
            assert a.info.parameters - a.info.trainable_parameters == b.info.parameters - b.info.trainable_parameters
            made = {p: await sampled_rows(p, IDS, (-1.0, 1.0, -1.0, 1.0)) for p in (a, b)}
            for policy, sampled in made.items():
                await policy.train(sampled)
                await policy.save_state(tmp_path / policy.spec.name)
            for policy in (a, b):
                served, trained = await policy.engine_logprobs(IDS), await policy.logprobs(IDS)
                np.testing.assert_allclose(served, trained, atol=1e-4)
            assert np.abs(await a.logprobs(IDS) - await b.logprobs(IDS)).max() > 1e-3
            after = await answers(policies, "abab")
            await a.train(made[a])
            await a.save_state(tmp_path / "whole")
        finally:
            await a.close()
        policies = await start_policies(specs)
        try:
            for policy in policies.values():
                await policy.load_state(tmp_path / policy.spec.name)
            assert await answers(policies, "abab") == after
            await policies["a"].train(made[a])
            await policies["a"].save_state(tmp_path / "resumed")
        finally:
            await policies["a"].close()

    asyncio.run(main())
    whole, resumed = (torch.load(tmp_path / n, weights_only=True)["learner"] for n in ("whole", "resumed"))
    assert whole["weights"].keys() == resumed["weights"].keys()
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name


def test_a_run_trains_and_its_result_loads(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    async def solve(task: str, llm: agl.LLM) -> float:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
        messages: Any = [{"role": "user", "content": task}]
        answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
        return float(len(answer.choices[0].message.content or "") % 2)

    algorithm = agl.GRPO(
        model=str(untrained_model), lora=LORA, device=agl.Device(quantize="4bit", max_context=512), group_size=4,
        batch_size=1, steps=1, val_before_train=False, max_staleness=1,
    )  # fmt: skip
    result = agl.Trainer(algorithm, directory=tmp_path, progress=False).fit(solve, ["1 + 2?"])
    assert result.policy is not None
    saved = AutoModelForCausalLM.from_pretrained(result.policy)
    assert {p.dtype for p in saved.parameters()} == {torch.float32}
    with pytest.raises(agl.errors.CheckpointError, match="quantize"):
        agl.Trainer(replace(algorithm, quantize="8bit"), directory=tmp_path, progress=False).fit(
            solve, ["1 + 2?"], resume=True
        )


def test_quantised_weights_are_counted_before_they_are_loaded(directory: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(directory).config
    config.update({"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 60, "head_dim": 64})
    shapes = memory.model_of_shapes(config, dtype=torch.float32)
    needed = {q: memory.base_bytes(shapes, memory.FLOAT32, q) for q in (None, "8bit", "4bit")}

    def require(free: int, quantize: Quantize | None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "free_bytes", lambda device: free)
            memory.require_memory("large", config, CPU, torch.float32, trained=False, lora=True, quantize=quantize)

    require(needed["4bit"], "4bit")
    with pytest.raises(ModelLoadError, match="a model fits of at most"):
        require(needed["4bit"] - 1, "4bit")
    with pytest.raises(ModelLoadError, match=r"lora=agl.LoraSpec\(16\), quantize='4bit', whose model takes"):
        require(needed["8bit"], None)
    require(needed["8bit"], "8bit")
