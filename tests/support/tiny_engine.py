"""A tiny random model with a tokenizer of bytes, a local engine on it, and what it ought to sample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from device import DEVICE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agl.trainer.engines.base import Completion, Sampling
from agl.trainer.local.engine.engine import LocalEngine
from agl.trainer.local.protocol import Failed, Finished

VOCABULARY = 272
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "attn_implementation": "eager",
    "initializer_range": 0.3,
}
ARCHITECTURES = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, after `<|end|>` (id 0)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<|end|>": 0} | {c: i for i, c in enumerate(letters, start=1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return fast


def tiny_model(architecture: str = "llama", **changes):
    """A random model whose next-token distribution is far from uniform."""
    torch.manual_seed(0)
    config, model = ARCHITECTURES[architecture]
    return model(config(**SIZES | changes)).eval()


def engine_for(model, **options) -> LocalEngine:
    return LocalEngine(model.to(DEVICE), tiny_tokenizer(), **{"device": DEVICE, "max_context": 512} | options)


def fail_first_pass(engine: LocalEngine, monkeypatch: Any) -> None:
    """The engine's next pass over prompts runs out of memory; those after it do not."""
    run, passes = engine._slots.prefill, []

    def failing(*arguments: Any) -> Any:
        passes.append(arguments)
        if len(passes) == 1:
            raise RuntimeError("out of memory")
        return run(*arguments)

    monkeypatch.setattr(engine._slots, "prefill", failing)


def finish(engine: LocalEngine) -> dict[int, Completion]:
    """Step until nothing is left."""
    answers = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                answers[event.request_id] = event.completion
    return answers


def sample(engine: LocalEngine, prompt, sampling: Sampling) -> Completion:
    engine.submit(1, np.asarray(prompt, np.int32), sampling)
    return finish(engine)[1]


def reference(model, prompt, completion: Completion, sampling: Sampling) -> np.ndarray:
    """Log-probs of an answer by one full forward pass and the sampling rules written out with numpy."""
    ids = torch.tensor(np.concatenate([prompt, completion.token_ids])).long()[None].to(next(model.parameters()).device)
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double().cpu().numpy()
    result = []
    for row, token in zip(logits, completion.token_ids, strict=True):
        if sampling.temperature:
            row = row / sampling.temperature
            order = np.argsort(-row, kind="stable")
            if sampling.top_k:
                row[order[sampling.top_k :]] = -np.inf
            probs = np.exp(row - row.max())
            probs /= probs.sum()
            before = np.cumsum(probs[order]) - probs[order]
            row[order[before >= sampling.top_p]] = -np.inf
        row = row - row.max()
        result.append(row[token] - math.log(np.exp(row).sum()))
    return np.asarray(result)


def prompts(n: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 60)).astype(np.int32) for _ in range(n)]
