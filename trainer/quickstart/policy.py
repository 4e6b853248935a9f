"""Make the tiny policy of the quickstart: a model and tokenizer from scratch, warm-started on demonstrations.

The same seed gives the same files, to the bit, on one machine with one number of threads.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from agl.errors import ConfigError
from agl.trainer.local.loading import no_progress_bar
from agl.trainer.quickstart.demos import CAPABLE, MIXED, Demo, demonstrate
from agl.trainer.quickstart.induction import set_induction_heads
from agl.trainer.quickstart.tokenizer import MAX_CONTEXT, WORDS, build_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ENCODED_AT_ONCE = 256
"""Demonstrations that the tokenizer encodes in one call."""

Progress = Callable[[str, int, int, float], None]
"""Called as `progress(stage, step, steps, loss)`; stage is the name of a `Stage`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the warm start, on demonstrations of one kind.

    Attributes:
        name: shown with its progress.
        demonstrate: draws a demonstration.
        steps: how many optimiser steps.
    """

    name: str
    demonstrate: Callable[[random.Random], Demo]
    steps: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of the warm start.

    Attributes:
        capability_steps: optimiser steps on good demonstrations, which teach the format and copying.
        mixed_steps: optimiser steps on demonstrations of mixed quality, which leave room for RL.
        rows: packed rows per step.
        row_tokens: tokens per row; a row holds as many demonstrations as fit.
        learning_rate: the peak, after `warmup_steps`; decays linearly to a tenth.
    """

    capability_steps: int = 240
    mixed_steps: int = 30
    rows: int = 16
    row_tokens: int = 144
    learning_rate: float = 2.5e-3
    warmup_steps: int = 10

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of a calculator agent."""
        return (
            Stage("capability", lambda rng: demonstrate(rng, CAPABLE), self.capability_steps),
            Stage("mixed quality", lambda rng: demonstrate(rng, MIXED), self.mixed_steps),
        )


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Facts of a policy that was made.

    Attributes:
        directory: a Hugging Face model directory.
        parameters: how many the model has.
        vocabulary: how many tokens the tokenizer knows.
        steps: optimiser steps.
        tokens: demonstration tokens seen.
        loss: of the last step, nats per written token.
        seconds: wall time.
    """

    directory: Path
    parameters: int
    vocabulary: int
    steps: int
    tokens: int
    loss: float
    seconds: float


def make_policy(
    directory: str | Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
    recipe: Recipe | None = None,
    stages: Sequence[Stage] | None = None,
    start: str | Path | None = None,
    corpus: Iterable[str] | None = None,
    vocabulary: int = 512,
    words: str = WORDS,
    hidden: int = 128,
    layers: int = 2,
    induction: bool = True,
) -> PolicyReport:
    """Make the tiny policy and save it as a Hugging Face model directory.

    Args:
        directory: where it is saved; made if it does not exist.
        seed: fixes the weights and the demonstrations.
        threads: torch threads while training; None leaves torch's own setting.
        progress: called after every step.
        recipe: settings of the warm start; None for those of the quickstart.
        stages: its parts; None for those of the recipe, of a calculator agent.
        start: a directory that this function made, to continue from its weights with its tokenizer; None starts from
            scratch.
        corpus: of a new tokenizer, as in `build_tokenizer`.
        vocabulary: likewise.
        words: likewise.
        hidden, layers: width of the model, a multiple of 64, and depth.
        induction: whether a model from scratch, of two layers or more, begins with heads that copy
            (`set_induction_heads`).

    Raises:
        ConfigError: `directory`, or what it would be in, is not a folder, or the recipe's rows are too short for a
            demonstration.
    """
    started = time.perf_counter()
    recipe = recipe or Recipe()
    stages = recipe.stages if stages is None else stages
    target = Path(directory)
    there = next(place for place in (target, *target.parents) if place.exists())
    if not there.is_dir():
        raise ConfigError("the policy needs a folder to be saved in", hint="name another place", path=there)
    with _torch_settings(seed, threads):
        if start is None:
            tokenizer = build_tokenizer(corpus, vocabulary, words)
            model = _build_model(tokenizer, hidden, layers)
            if induction and layers > 1:
                set_induction_heads(model)
        else:
            tokenizer, model = _saved(Path(start))
        tokens, loss = _warm_start(model, tokenizer, recipe, stages, random.Random(seed), progress)
    _save(model, tokenizer, target)
    return PolicyReport(
        directory=target,
        parameters=sum(p.numel() for p in model.parameters()),
        vocabulary=len(tokenizer),
        steps=sum(stage.steps for stage in stages),
        tokens=tokens,
        loss=loss,
        seconds=time.perf_counter() - started,
    )


def _saved(directory: Path) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    """What `_save` wrote."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    with no_progress_bar():
        model = LlamaForCausalLM.from_pretrained(str(directory), attn_implementation="eager", local_files_only=True)
    return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True), model


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with no_progress_bar():
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # The one class name with which every transformers release, and so every server, loads tokenizer.json unchanged.
    file = target / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _build_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    # Llama, not Qwen: transformers loads Qwen's own tokenizer for a Qwen config, whatever the directory holds.
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.backend_tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.backend_tokenizer.token_to_id("<|endoftext|>"),
        # At the usual 0.02 a model this narrow starts with nearly flat attention, and copying takes far longer to form.
        initializer_range=0.06,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")
    return model


@contextmanager
def _torch_settings(seed: int, threads: int | None) -> Iterator[None]:
    """Seed torch and set its threads inside the block; restore both afterwards."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if threads is not None:
                torch.set_num_threads(threads)
            yield
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Demonstrations packed into B rows of T tokens.

    Attributes:
        ids: int64 [B, T].
        positions: int64 [B, T], from 0 in each demonstration.
        mask: float32 [B, 1, T, T], added to attention scores: a token sees its own demonstration up to itself.
        predictors: int64 [S], flat indices of the outputs that predict a written token.
        targets: int64 [S], those tokens.
        tokens: how many of the B * T are not padding.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    tokens: int


def _warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    stages: Sequence[Stage],
    rng: random.Random,
    progress: Progress | None,
) -> tuple[int, float]:
    """Train in place; returns (tokens seen, last loss)."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    total = sum(stage.steps for stage in stages)
    done = 0
    tokens = 0
    loss = float("nan")
    for stage in stages:
        batches = _batches(tokenizer, recipe, rng, stage.demonstrate)
        for step in range(1, stage.steps + 1):
            rate = min((done + 1) / recipe.warmup_steps, 1 - 0.9 * done / total)
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * rate
            batch = next(batches)
            loss = _step(model, optimizer, batch)
            done = done + 1
            tokens = tokens + batch.tokens
            if progress is not None:
                progress(stage.name, step, stage.steps, loss)
    return tokens, loss


def _step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: _Batch) -> float:
    # Where the CPU does not multiply bfloat16 natively, autocast is slower than float32.
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
        hidden = model.model(
            input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[batch.predictors])
    loss = functional.cross_entropy(logits.float(), batch.targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _batches(
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: random.Random,
    draw: Callable[[random.Random], Demo],
) -> Iterator[_Batch]:
    """Batches without end; each demonstration goes to the first row with room, and opens the next batch if none has."""
    rows: list[list[_Encoded]] = [[] for _ in range(recipe.rows)]
    room = [recipe.row_tokens] * recipe.rows
    for demo in _encoded(tokenizer, rng, draw):
        length = demo[0].size
        if length > recipe.row_tokens:
            raise ConfigError(
                f"a demonstration of {length} tokens does not fit into a row of {recipe.row_tokens}",
                hint="raise Recipe.row_tokens to at least 100",
            )
        home = next((k for k, free in enumerate(room) if free >= length), None)
        if home is None:
            yield _pack(rows, recipe.row_tokens)
            rows = [[] for _ in range(recipe.rows)]
            room = [recipe.row_tokens] * recipe.rows
            home = 0
        rows[home].append(demo)
        room[home] -= length


_Encoded = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Token ids, and for each whether the policy writes it."""


def _encoded(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, draw: Callable[[random.Random], Demo]
) -> Iterator[_Encoded]:
    """Demonstrations without end."""
    encode = tokenizer.backend_tokenizer.encode_batch
    while True:
        demos = [draw(rng) for _ in range(ENCODED_AT_ONCE)]
        texts = [text for demo in demos for turn in demo for text in (turn.prompt, turn.answer)]
        pieces = iter([np.array(piece.ids) for piece in encode(texts, add_special_tokens=False)])
        for demo in demos:
            parts = list(islice(pieces, 2 * len(demo)))
            mine = np.resize((False, True), len(parts))
            yield np.concatenate(parts), np.repeat(mine, [part.size for part in parts])


def _pack(rows: Sequence[Sequence[_Encoded]], length: int) -> _Batch:
    ids_BT = np.zeros((len(rows), length), np.int64)
    positions_BT = np.zeros_like(ids_BT)
    owner_BT = np.full_like(ids_BT, -1)
    written_BT = np.zeros_like(ids_BT, np.bool_)
    for r, row in enumerate(rows):
        end = 0
        for k, (ids, written) in enumerate(row):
            here = slice(end, end + ids.size)
            end = end + ids.size
            ids_BT[r, here], written_BT[r, here] = ids, written
            positions_BT[r, here], owner_BT[r, here] = np.arange(ids.size), k
    owner = torch.from_numpy(owner_BT)
    sees = (owner[:, :, None] == owner[:, None, :]).tril()
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]
    ids = torch.from_numpy(ids_BT)
    chosen = torch.from_numpy(np.flatnonzero(written_BT))
    tokens = int((owner_BT >= 0).sum())
    return _Batch(ids, torch.from_numpy(positions_BT), mask, chosen - 1, ids.flatten()[chosen], tokens)
