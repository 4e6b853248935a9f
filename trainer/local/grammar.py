"""Answers that are held to a JSON schema, tool calls too: which tokens may come next, by llguidance.

Invariant: engine, vLLM and learner hide the same tokens at the same places, so the log-probs of an answer are those of
the distribution that it was drawn from: masked, and normalised again. A mask that takes long delays its own answer.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agl.errors import ConfigError
from agl.extras import require
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import IntArray
from agl.trainer.http.turns import Turns
from agl.trainer.local.lark import Lark
from agl.trainer.local.schema_check import SchemaCheck
from agl.trainer.local.schema_worker import error_of, parser_limits, stop_tokenizer
from agl.trainer.processes.limited_worker import lower_priority

_HIDDEN = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0)
"""For each byte of `Grammars.bits`, its bits that are 0; bool [256, 8]."""
Places = npt.NDArray[np.integer[Any]]

_KEPT = 64
"""How many grammars are kept compiled."""
THREADS = 2
"""How many grammars are compiled, and how many slow masks are computed, at once."""


@functools.cache
def _compile_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "agl-schemas", lower_priority)


@functools.cache
def _mask_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "agl-masks", lower_priority)


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A grammar, ready for any number of answers.

    Attributes:
        matcher: at the beginning of an answer; is copied.
        first_W: int32 [words], what may come first.
        text: the grammar as vLLM takes it: Lark, with the stop tokens.
    """

    matcher: Any
    first_W: IntArray
    text: str

    def begin(self) -> HeldAnswer:
        """An answer that has no tokens yet."""
        return HeldAnswer(self.matcher.deep_copy(), self, self.first_W)


@dataclass(slots=True, eq=False)
class HeldAnswer:
    """An answer within a grammar.

    Attributes:
        matcher: after the tokens so far.
        grammar: that it is within.
        bits_W: int32 [words], what may come next; None if
        it is not known yet. pending: what computes it on another thread. seconds: that the last one took.
    """

    matcher: Any
    grammar: Compiled | None = None
    bits_W: IntArray | None = None
    pending: Future[IntArray] | None = None
    seconds: float = 0.0

    @property
    def error(self) -> str:
        """Why it cannot go on; "" if it can."""
        return self.matcher.get_error() if self.matcher.is_error() else ""

    @property
    def is_waiting(self) -> bool:
        """Whether another thread still computes what may come next."""
        return self.pending is not None and not self.pending.done()

    def add(self, token: int) -> None:
        """Take the next token; `error` says whether that was possible."""
        self.bits_W = None
        self.matcher.consume_token(token)

    def compute(self, bits_NW: IntArray, row: int) -> None:
        """Write what may come next into a row, int32 [words]."""
        from llguidance.numpy import fill_next_token_bitmask

        began = time.perf_counter()
        fill_next_token_bitmask(self.matcher, bits_NW, row)
        self.seconds = time.perf_counter() - began


class Grammars:
    """The grammars of a tokenizer.

    Args:
        tokenizer: a fast one.
        vocabulary: how many logits the model has.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._words = -(-vocabulary // 32)
        self._vocabulary = vocabulary
        self._prepared = functools.cache(self._prepare)
        self._lark = Lark(tokenizer)
        self._check = SchemaCheck(tokenizer, vocabulary)
        self._compiled = functools.lru_cache(_KEPT)(self._compile)
        self._admitted: dict[str, Compiled] = {}
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()

    def _prepare(self, stops: tuple[int, ...]) -> Any:
        return stop_tokenizer(self._check.tokenizer, self._vocabulary, stops)

    def fits(self, other: Grammars) -> bool:
        """Whether another one has the same grammars: those of this tokenizer and as many logits."""
        return other._tokenizer is self._tokenizer and other._vocabulary == self._vocabulary

    def matcher(self, grammar: str) -> Any:
        """A matcher at the beginning of an answer; None for the empty grammar. Errors as of `compiled`."""
        return self.compiled(grammar).matcher.deep_copy() if grammar else None

    def recorded(self, grammar: str) -> Any:
        """A matcher at the beginning of an answer that was recorded; None for the empty grammar. Blocks.

        A store may hold what no gateway has admitted: the grammar is tried as that of a request is, once.

        Raises: as `admitted`.
        """
        if not grammar:
            return None
        require("an answer in a JSON schema", "structured")
        return self._admit(grammar).matcher.deep_copy()

    def compiled(self, grammar: str) -> Compiled:
        """A grammar, compiled here and now. Only for those of programs and those that were admitted before: some take
        minutes and gigabytes.

        Args:
            grammar: what `agl.trainer.engines.base.json_grammar` made.

        Raises:
            ConfigError: the schema cannot be held.
            MissingExtraError: llguidance is not installed.
        """
        return self._compiled(grammar)

    async def admitted(self, grammar: str, owner: str | None) -> Compiled:
        """The grammar of a request, compiled on a thread after a process with limits has compiled it and answered by
        it. Of each owner one at a time.

        Args:
            grammar: as for `compiled`.
            owner: as in `agl.trainer.engines.base.Request`.

        Raises:
            ConfigError: the schema cannot be held, or takes more time or memory than it may; `where` has "form", the
                number of its form in the grammar, and "schema", the place in that form's schema.
            MissingExtraError: llguidance is not installed.
        """
        require("an answer in a JSON schema", "structured")
        if (compiled := self._admitted.get(grammar)) is not None:
            return compiled
        key = owner or grammar
        if (turns := self._turns.get(key)) is None:
            turns = self._turns[key] = Turns(_compile_threads())
        async with turns as turn:
            return await turn.run(self._admit, grammar)

    def _admit(self, grammar: str) -> Compiled:
        if (compiled := self._admitted.get(grammar)) is None:
            self._check.prove(grammar, self._lark)
            compiled = self._compile(grammar)
            while len(self._admitted) >= _KEPT:
                self._admitted.pop(next(iter(self._admitted)), None)
            self._admitted[grammar] = compiled
        return compiled

    def _compile(self, grammar: str) -> Compiled:
        require("an answer in a JSON schema", "structured")
        from llguidance import LLMatcher

        stop = json.loads(grammar)["stop"]
        tokenizer = self._prepared(tuple(stop))
        why = ""
        for text in self._lark.texts(grammar):
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
            if not matcher.is_error():
                break
            why = why or error_of(matcher)
        else:
            raise ConfigError(
                f"answers cannot be held to this schema: {why}", hint="simplify the schema, or leave it out"
            )
        first_W = self.bits([matcher])[0]
        stops = " | ".join(f"<[{token}]>" for token in stop)
        return Compiled(matcher, first_W, f"start: whole {stops and f'({stops})'}\n{text.replace('start', 'whole', 1)}")

    def bits(self, matchers: Sequence[Any]) -> IntArray:
        """What may come next, int32 [N, words]: bit t % 32 of word t // 32 is token t; all of them for None."""
        bits_NW = self.everything(len(matchers))
        for i, matcher in enumerate(matchers):
            if matcher is not None:
                HeldAnswer(matcher).compute(bits_NW, i)
        return bits_NW

    def everything(self, n: int) -> IntArray:
        """Bits that hide nothing, int32 [N, words]."""
        return np.full((n, self._words), -1, np.int32)

    def bits_of(self, answers: Sequence[HeldAnswer | None], seconds: float) -> tuple[IntArray, set[int]]:
        """What may come next in answers of which some are held, and those of which it is not known in time.

        Those that were slow before wait for those that were not. What is not computed here within the time is computed
        on other threads, for a later call.

        Args:
            answers: N.
            seconds: how long this may take.

        Returns:
            int32 [N, words], as of `bits`, and the numbers of the answers that have to wait.
        """
        bits_NW = self.everything(len(answers))
        end = time.perf_counter() + seconds
        held = [(answer.seconds, i, answer) for i, answer in enumerate(answers) if answer is not None]
        # Answers within one grammar may wait for each other in llguidance.
        busy = {id(answer.grammar) for _, _, answer in held if answer.is_waiting}
        late: dict[int, HeldAnswer] = {}
        for last_seconds, i, answer in sorted(held, key=itemgetter(0)):
            if answer.bits_W is not None:
                bits_NW[i] = answer.bits_W
            elif (
                answer.pending is None
                and id(answer.grammar) not in busy
                and last_seconds < seconds
                and time.perf_counter() < end
            ):
                answer.compute(bits_NW, i)
            else:
                answer.pending = answer.pending or _mask_threads().submit(self._alone, answer)
                busy.add(id(answer.grammar))
                late[i] = answer
        for i, answer in [*late.items()]:
            if not answer.is_waiting and answer.pending is not None:
                bits_NW[i] = answer.bits_W = answer.pending.result()
                answer.pending = None
                del late[i]
        return bits_NW, {*late}

    def _alone(self, answer: HeldAnswer) -> IntArray:
        bits_NW = self.everything(1)
        answer.compute(bits_NW, 0)
        return bits_NW[0]

    def of_rows(self, rows: Sequence[TrainingRow], places: Sequence[Places]) -> Tensor | None:
        """`bits` before the tokens at those places of each row; None if no row has a grammar."""
        if not any(row.grammars for row in rows):
            return None
        return torch.from_numpy(np.concatenate([self._of(row)[at] for row, at in zip(rows, places, strict=True)]))

    def _of(self, row: TrainingRow) -> IntArray:
        bits_TW = self.everything(len(row))
        for c, grammar in enumerate(row.grammars):
            if matcher := self.recorded(grammar):
                for t in np.flatnonzero(row.calls == c):
                    bits_TW[t] = self.bits([matcher])[0]
                    matcher.consume_token(int(row.token_ids[t]))
        return bits_TW


def hidden(bits_NW: Tensor, vocabulary: int) -> Tensor:
    """bool [N, V], on the device of the bits: which tokens may not come next."""
    table = _HIDDEN.to(bits_NW.device)
    return table[bits_NW.view(torch.uint8).int()].flatten(1)[:, :vocabulary]
