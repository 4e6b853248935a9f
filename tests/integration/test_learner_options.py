"""What the learner does on a GPU, on the CPU with the vocabularies of real models: each option computes what float32
does, and takes the memory that the formula says."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from allocations import LargestTensor, peak_bytes
from call_trees import call, trajectory
from device import DEVICE, LARGE_BFLOAT16
from tiny_learner import gradients
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agl.mdp.sequence import TrainingRow, merge
from agl.mdp.types import int_array
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.learner.prefix_trees import chain
from agl.trainer.local.memory import training_bytes, update_memory

torch.set_num_threads(1)

LIMIT = "agl.trainer.local.learner.logprobs.CHUNK_ELEMENTS"
PLAIN = {"learning_rate": 1e-4, "autocast": "float32", "share_prefixes": False}
LLAMA, QWEN3 = (LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
MODELS: dict[str, Any] = {
    "llama-32k": (*LLAMA, dict(vocab_size=32_000, hidden_size=128, num_hidden_layers=2)),
    "qwen3-152k": (*QWEN3, dict(vocab_size=151_936, hidden_size=64, num_hidden_layers=2)),
    # Of 30 and 40 million parameters, whose memory is more than that of small change.
    "llama-30m": (*LLAMA, dict(vocab_size=32_000, hidden_size=512, num_hidden_layers=5)),
    "qwen3-40m": (*QWEN3, dict(vocab_size=151_936, hidden_size=256, num_hidden_layers=2)),
}


@functools.cache
def model(name: str) -> Any:
    config, kind, shape = MODELS[name]
    torch.manual_seed(0)
    made = kind(
        config(
            **shape, intermediate_size=3 * shape["hidden_size"], num_attention_heads=8, num_key_value_heads=2,
            head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, attn_implementation="eager",
        )
    )  # fmt: skip
    return made.to(DEVICE)


def learner(name: str, attention: str = "eager", **options: Any) -> Learner:
    subject = copy.deepcopy(model(name))
    subject.set_attn_implementation(attention)
    return Learner(subject, LearnerConfig(**{**PLAIN, **options}), DEVICE)


@functools.cache
def rows(name: str) -> list[TrainingRow]:
    """Two rollouts that begin alike, one of them a tree; their log-probs are the model's with some noise."""
    rng = np.random.default_rng(0)

    def tokens(n: int) -> list[int]:
        return rng.integers(0, MODELS[name][2]["vocab_size"], n).tolist()

    prompt, answer = tokens(60), tokens(20)
    tree = [call(0, prompt, answer), call(1, prompt, tokens(16)), call(2, [*prompt, *answer, *tokens(9)], tokens(20))]
    chained = [call(0, prompt[:40], tokens(30), rollout="s", temperature=0.8)]
    made = [
        *merge(trajectory(tree), {f"r/{k}": a for k, a in enumerate((1.0, -1.5, 0.5))}),
        *merge(trajectory(chained, "s"), {"s/0": 0.7}),
    ]
    assert not all(row.is_chain for row in made)
    true = learner(name).sequence_logprobs(made)
    noisy = [x + rng.normal(scale=0.1, size=x.size) for x in true]
    return [
        replace(r, logprobs=np.where(r.action_mask, x, 0).astype(np.float32)) for r, x in zip(made, noisy, strict=True)
    ]


@functools.cache
def reference(name: str) -> tuple[dict[str, float], dict[str, torch.Tensor], np.ndarray]:
    """Metrics, gradient and log-probs in float32 with eager attention, all logits at once."""
    subject = learner(name, entropy_coef=0.01)
    return *gradients(subject, rows(name)), trained_logprobs(subject, name)


def trained_logprobs(subject: Learner, name: str) -> np.ndarray:
    """With the options of updates: `sequence_logprobs` would leave autocast out."""
    found = subject._forward(subject._policy, rows(name), [row.action_mask for row in rows(name)])
    return np.concatenate([x[row.action_mask] for x, row in zip(found, rows(name), strict=True)])


EXACT = {"logprobs": 2e-5, "loss": 1e-5, "gradient": 2e-4}
"""Largest differences from float32: log-probs and loss in nats, the gradient's as a share of its norm."""
ROUNDED = {"logprobs": 0.05, "loss": 5e-3, "gradient": 0.05}


BEGINNING: dict[str, Any] = {"share_prefixes": True, "max_tokens_per_microbatch": 100}
"""What both rows begin with is computed once, for a micro-batch of each."""
OPTIONS: dict[str, tuple[dict[str, Any], int | None, dict[str, float]]] = {
    "sdpa": ({"attention": "sdpa"}, None, EXACT),
    "trees": ({"share_prefixes": True}, None, EXACT),
    "beginning": (BEGINNING, None, EXACT),
    "chunks": ({}, 1 << 21, EXACT),
    "checkpointing": ({"activation_checkpointing": True}, None, EXACT),
    "bfloat16": ({"autocast": "bfloat16"}, None, ROUNDED),
    "bfloat16 sdpa": ({"attention": "sdpa", "autocast": "bfloat16"}, None, ROUNDED),
    "all but bfloat16": (BEGINNING | {"activation_checkpointing": True}, 1 << 21, EXACT),
    "all": (BEGINNING | {"autocast": "bfloat16", "activation_checkpointing": True}, 1 << 21, ROUNDED),
}
"""Name -> settings, logits in a chunk, bounds."""


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("llama-32k", option) for option in OPTIONS),
        ("qwen3-152k", "chunks"),
        pytest.param("qwen3-152k", "all", marks=pytest.mark.night),
    ],
)
def test_each_option_computes_what_float32_does(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, chunk, bounds = OPTIONS[option]
    expected, expected_gradient, expected_logprobs = reference(name)
    if chunk is not None:
        monkeypatch.setattr(LIMIT, chunk)
    subject = learner(name, entropy_coef=0.01, **options)
    metrics, found = gradients(subject, rows(name))
    assert np.abs(trained_logprobs(subject, name) - expected_logprobs).max() < bounds["logprobs"]
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=bounds["loss"])
    assert (
        metrics["forwarded_tokens"] == metrics["unique_tokens" if "share_prefixes" in options else "forwarded_tokens"]
    )
    assert found.keys() == expected_gradient.keys()
    difference = torch.stack([(found[n] - g).norm() for n, g in expected_gradient.items()]).norm()
    norm = torch.stack([g.norm() for g in expected_gradient.values()]).norm()
    assert difference < bounds["gradient"] * norm


def test_the_fused_optimizer_steps_as_the_plain_one_does() -> None:
    subject = learner("qwen3-152k", weight_decay=0.1, share_prefixes=True, activation_checkpointing=True)
    trained = dict(subject._model.named_parameters())
    copies = {n: p.detach().clone().requires_grad_() for n, p in trained.items()}
    plain = torch.optim.AdamW(copies.values(), lr=1e-4, weight_decay=0.1, fused=False, foreach=False)
    for _ in range(2):
        subject.update(rows("qwen3-152k"))
        for name, parameter in trained.items():
            copies[name].grad = parameter.grad
        plain.step()
        for name, parameter in trained.items():
            torch.testing.assert_close(parameter, copies[name], rtol=1e-5, atol=1e-7)


@pytest.mark.night
def test_no_tensor_of_all_tokens_and_the_whole_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """In no operation of an update or of log-probs, forward or backward."""
    name, limit = "qwen3-152k", 1 << 21
    vocabulary = MODELS[name][2]["vocab_size"]
    trained = sum(row.n_actions for row in rows(name))
    assert limit < trained * vocabulary / 4
    for chunk, largest in ((trained * vocabulary, trained * vocabulary), (limit, limit)):
        monkeypatch.setattr(LIMIT, chunk)
        # Tensors are not seen where FlexAttention is compiled.
        options: dict[str, Any] = dict(autocast="bfloat16", activation_checkpointing=True, entropy_coef=0.01)
        subject = learner(name, share_prefixes=DEVICE.type == "cpu", **options)
        with LargestTensor(vocabulary, MODELS[name][2]["hidden_size"]) as seen:
            subject.update(rows(name))
            if chunk == limit:
                subject.sequence_logprobs(rows(name))
        assert limit / 2 < seen.elements <= largest
        assert (seen.elements > limit) == (chunk > limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length", "options"),
    [
        pytest.param("llama-30m", 256, {"attention": "eager"}, marks=pytest.mark.night),
        ("llama-32k", 256, {"share_prefixes": True, "autocast": "bfloat16"}),
        *(
            pytest.param("qwen3-40m", 512, {**options, "autocast": "bfloat16"}, marks=LARGE_BFLOAT16)
            for options in ({"share_prefixes": True}, {"attention": "sdpa", "activation_checkpointing": True})
        ),
        *(
            pytest.param("llama-30m", 512, options, marks=pytest.mark.night)
            for options in (
                {"attention": "sdpa"},
                {"share_prefixes": True, "common": 256},
                {"share_prefixes": True, "activation_checkpointing": True, "common": 256},
            )
        ),
        pytest.param(
            "llama-30m",
            512,
            {"attention": "eager", "autocast": "bfloat16"},
            marks=pytest.mark.night,
        ),
    ],
    ids=lambda x: "+".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else str(x),
)
def test_an_update_takes_the_memory_that_the_formula_says(
    name: str, length: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak within a tenth, and what an update adds to weights, gradient and moments within a quarter; also where
    `common` tokens are computed once, and kept while each of two micro-batches of three rows is."""
    common, batch = options.get("common", 0), 3 if "common" in options else 2
    options = {k: v for k, v in options.items() if k != "common"}
    for module in (LIMIT, "agl.trainer.local.memory.CHUNK_ELEMENTS"):
        monkeypatch.setattr(module, length << 14)
    subject = learner(name, max_tokens_per_microbatch=2 * length, **options)
    data = [long_row(i, length, MODELS[name][2]["vocab_size"], common) for i in range(2 * batch)]
    subject.update(data)  # makes the moments
    subject._optimizer.zero_grad(set_to_none=True)
    resident = training_bytes(subject._model)
    gradient = sum(p.nbytes for p in subject._model.parameters())
    metrics: dict[str, float] = {}
    peak = resident - gradient + peak_bytes(lambda: metrics.update(subject.update(data)), DEVICE)
    assert metrics["forwarded_tokens"] == 2 * batch * (length - common) + common
    formula = update_memory(
        subject._model, subject.config, 2 * length, row_tokens=length, trained=batch * data[0].n_actions,
        autocast=subject.autocast is not None,
    )  # fmt: skip
    assert formula.resident == resident
    assert formula.total == pytest.approx(peak, rel=0.1)
    assert formula.total - resident == pytest.approx(peak - resident, rel=0.25)


def long_row(i: int, length: int, vocabulary: int, common: int = 0) -> TrainingRow:
    mask = np.arange(length) >= length * 7 // 8
    ids = np.random.default_rng(i).integers(0, vocabulary, length)
    ids[:common] = np.random.default_rng(100).integers(0, vocabulary, common)
    return replace(
        chain(int_array(ids)), rollout_id=str(i), call_ids=(f"{i}/0",), action_mask=mask, calls=np.where(mask, 0, -1),
        logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32), advantages=mask.astype(np.float32),
    )  # fmt: skip
