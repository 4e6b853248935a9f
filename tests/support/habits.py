"""Makes tiny policies with habits: models from scratch that give one of a few answers in each of a few situations.

They stand where a program needs a policy that is right some of the time, so that a group of its rollouts has spread.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Situation:
    """A conversation so far, and the answers of which each is given equally often."""

    messages: Sequence[dict[str, Any]]
    answers: Sequence[str]
    tools: Sequence[dict[str, Any]] = field(default=())


def tool_call(name: str, arguments: str) -> str:
    """The text of a tool call; `arguments` is JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def make(
    directory: Path,
    situations: Sequence[Situation],
    *,
    max_context: int,
    steps: int = 200,
    batch: int = 8,
    seed: int = 0,
) -> Path:
    """Train a policy on the situations and save it as a Hugging Face model directory. Short situations are cheap: an
    answer that depends on no question is learnt from a few."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from agl.trainer.quickstart.policy import _save
    from agl.trainer.quickstart.tokenizer import build_tokenizer

    template = build_tokenizer()
    prompts = [
        template.apply_chat_template(
            list(s.messages), tools=list(s.tools) or None, add_generation_prompt=True, tokenize=False
        )
        for s in situations
    ]
    tokenizer = _tokenizer([*prompts, *(a for s in situations for a in s.answers)], template, max_context)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max_context, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rng = random.Random(seed)
    rows = [
        (head, head + tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False))
        for prompt, situation in zip(prompts, situations, strict=True)
        for head in [tokenizer.encode(prompt, add_special_tokens=False)]
        for answer in situation.answers
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min((step + 1) / 10, 1 - 0.9 * step / steps)
        chosen = rng.sample(rows, min(batch, len(rows)))
        ids = torch.full((len(chosen), max(len(row) for _, row in chosen)), tokenizer.pad_token_id)
        targets = torch.full_like(ids, -100)
        for k, (head, row) in enumerate(chosen):
            ids[k, : len(row)] = torch.tensor(row)
            targets[k, len(head) - 1 : len(row) - 1] = torch.tensor(row[len(head) :])
        hidden = model.model(ids).last_hidden_state[targets != -100]
        loss = functional.cross_entropy(model.lm_head(hidden), targets[targets != -100])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.set_num_threads(threads)
    _save(model, tokenizer, directory)
    return directory


def _tokenizer(texts: Iterable[str], template: Any, max_context: int) -> Any:
    """A byte-level BPE tokenizer of those texts, with the quickstart's special tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from agl.trainer.quickstart.tokenizer import MARKERS, SPECIAL_TOKENS

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2048, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=max_context
    )
    tokenizer.chat_template = template.chat_template
    return tokenizer


def as_hub_model(home: Path, name: str, directory: Path) -> Path:
    """A Hugging Face home (for `HF_HOME`, with `HF_HUB_OFFLINE=1`) in which `directory` is the hub's model `name`."""
    revision = "0" * 40
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / revision).symlink_to(directory.resolve(), target_is_directory=True)
    return home
