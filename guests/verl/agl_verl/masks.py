"""Hides from verl's actor and reference what a grammar hid when an answer was sampled; loaded as verl's `external_lib`.

Invariant: log-probs, entropy and their gradients are those of the distribution that the answer was drawn from: masked,
and normalised again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from verl.utils.tensordict_utils import get
from verl.workers.engine import FSDPEngineWithLMHead

from agl.trainer.local.grammar import Grammars, hidden
from agl_verl.rows import GRAMMARS

FLOOR = -1e9
"""Logit of a hidden token. verl's entropy multiplies its probability, 0, by it: it must be finite."""

Answers = Sequence[tuple[int, int, str]]
"""(first token, end, grammar) of each answer of a row that was held to one."""


def hide(
    logits: torch.Tensor, grammars: Grammars, held: Sequence[Answers], input_ids: Any, columns: Any = None
) -> None:
    """Set the logits of hidden tokens, in place.

    Args:
        logits: [B, T, V] of B rows that are padded on the right, or [1, T, V] of rows one after another.
        held: of each of the B rows.
        input_ids: nested [B, *].
        columns: int64 [T] of rows one after another: where in [1, P, V] the logits of each of their tokens are, -1
            where there are none. None: all of them are there, in order.
    """
    starts = input_ids.offsets().tolist()
    ids = input_ids.values().tolist()
    packed = columns is not None or logits.shape[0] != len(held)
    columns = range(len(ids)) if columns is None else columns
    places = []
    bits = []
    for row, answers in enumerate(held):
        for first, end, grammar in answers:
            matcher = grammars.recorded(grammar)
            for t in range(first, end):
                # The output before a token predicts it.
                place = (0, columns[starts[row] + t - 1]) if packed else (row, t - 1)
                if place[1] >= 0:
                    places.append(place)
                    bits.append(grammars.bits([matcher])[0])
                matcher.consume_token(ids[starts[row] + t])
    if places:
        rows, columns = torch.tensor(places, device=logits.device).T
        mask = hidden(torch.from_numpy(np.stack(bits)).to(logits.device), logits.shape[-1])
        logits[rows, columns] = logits[rows, columns].masked_fill(mask, FLOOR)


def held_answers(micro_batch: Any) -> list[Answers]:
    """Of each row of one of verl's micro-batches."""
    texts = get(micro_batch, GRAMMARS, "")
    # One value stands for all rows where they share it.
    texts = [texts] * len(micro_batch["input_ids"].offsets().diff()) if isinstance(texts, str) else texts
    return [json.loads(text) if text else [] for text in texts]


def grammars_of(engine: Any, logits: torch.Tensor) -> Grammars:
    """Of one of verl's engines, for its vocabulary."""
    if not hasattr(engine, "_agl_grammars"):
        engine._agl_grammars = Grammars(engine.model_config.tokenizer, logits.shape[-1])
    return engine._agl_grammars


def _masked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        held = held_answers(micro_batch)
        if any(held):
            hide(output.logits, grammars_of(self, output.logits), held, micro_batch["input_ids"])
        return original(self, output, output_args, micro_batch, logits_processor_func)

    return prepare_model_outputs


_engine: Any = FSDPEngineWithLMHead
_engine.prepare_model_outputs = _masked(_engine.prepare_model_outputs)
