"""Answers that are held to a JSON schema: which tokens may come next, by llguidance.

Invariant: engine and learner hide the same tokens at the same places, so the log-probs of an answer are those of the
distribution that it was drawn from: masked, and normalised again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agl.errors import ConfigError
from agl.extras import require
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import IntArray

_HIDDEN = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0)
"""For each byte of `Grammars.bits`, its bits that are 0; bool [256, 8]."""
Places = npt.NDArray[np.integer[Any]]
_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""As `json.dumps` writes it: of free whitespace a policy could write without end. What llguidance does not know of a
schema holds nothing back."""


class Grammars:
    """The grammars of a tokenizer.

    Args:
        tokenizer: a fast one. vocabulary: how many logits the model has.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._words = -(-vocabulary // 32)
        self._vocabulary = vocabulary
        self._prepared = functools.cache(self._prepare)

    def _prepare(self, stops: tuple[int, ...]) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=list(stops) or None)

    def matcher(self, grammar: str) -> Any:
        """A matcher at the beginning of an answer; None for the empty grammar.

        Args:
            grammar: what `agl.trainer.engines.base.json_grammar` made.

        Raises:
            ConfigError: the schema cannot be held.
            MissingExtraError: llguidance is not installed.
        """
        if not grammar:
            return None
        require("an answer in a JSON schema", "structured")
        from llguidance import LLMatcher

        parts = json.loads(grammar)
        try:
            compiled = LLMatcher.grammar_from_json_schema(parts["schema"], overrides=_FORM)
            matcher = LLMatcher(self._prepared(tuple(parts["stop"])), compiled, log_level=0)
        except ValueError as error:
            raise _refused(error) from error
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher

    def bits(self, matchers: Sequence[Any]) -> IntArray:
        """What may come next, int32 [N, words]: bit t % 32 of word t // 32 is token t; all of them for None."""
        from llguidance.numpy import fill_next_token_bitmask

        bits_NW = np.full((len(matchers), self._words), -1, np.int32)
        for i, matcher in enumerate(matchers):
            if matcher is not None:
                fill_next_token_bitmask(matcher, bits_NW, i)
        return bits_NW

    def of_rows(self, rows: Sequence[TrainingRow], places: Sequence[Places]) -> Tensor | None:
        """`bits` before the tokens at those places of each row; None if no row has a grammar."""
        if not any(row.grammars for row in rows):
            return None
        return torch.from_numpy(np.concatenate([self._of(row)[at] for row, at in zip(rows, places, strict=True)]))

    def _of(self, row: TrainingRow) -> IntArray:
        bits_TW = np.full((len(row), self._words), -1, np.int32)
        for c, grammar in enumerate(row.grammars):
            if matcher := self.matcher(grammar):
                for t in np.flatnonzero(row.calls == c):
                    bits_TW[t] = self.bits([matcher])[0]
                    matcher.consume_token(int(row.token_ids[t]))
        return bits_TW


def hidden(bits_NW: Tensor, vocabulary: int) -> Tensor:
    """bool [N, V], on the device of the bits: which tokens may not come next."""
    table = _HIDDEN.to(bits_NW.device)
    return table[bits_NW.view(torch.uint8).int()].flatten(1)[:, :vocabulary]


def _refused(reason: object) -> ConfigError:
    return ConfigError(f"answers cannot be held to this schema: {reason}", hint="simplify the schema, or leave it out")
