"""The local engine: samples many requests at once from the learner's own weights, one token per row and step.

Invariant: every token is drawn from the weights as they are at that step, and its log-prob is the one that a full
forward pass over the same tokens would give; batching and prefix reuse change only the speed.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agl.errors import AglError, ConfigError, EngineError
from agl.mdp.selection import DEFAULT_POLICY
from agl.mdp.types import FloatArray, IntArray
from agl.trainer.engines.base import Completion, Sampling, StopReason, check_prompt, check_sampling, empty_completion
from agl.trainer.local.architecture import exact_context
from agl.trainer.local.engine.forward import SlotModel
from agl.trainer.local.engine.kv_cache import PrefixNode, PrefixTree, SlotCache, common_prefix
from agl.trainer.local.engine.sampler import StopTexts, UniformStream, Warp, most_likely
from agl.trainer.local.grammar import Compiled, Grammars, HeldAnswer, hidden
from agl.trainer.local.lora import Adapters
from agl.trainer.local.memory import training_bytes
from agl.trainer.local.protocol import EngineEvent, Failed, Finished, Tokens
from agl.trainer.rendering.token_text import TokenText

PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
"""At most this many prompt tokens, padding included, in one forward pass: bounds the memory for attention scores."""
CHUNK_TOKENS = {"cpu": 32, "cuda": 256}
"""Prompt tokens of a row in one forward pass, and what requests share: whole chunks."""
MASK_SECONDS = 0.005
"""How long a step may at least find out what may come next in its rows with schemas; else as long as it has taken."""
SCORED_STEPS = 8
"""How many tokens `logprobs` decodes one by one."""
MEMORY_SHARE = 0.3
"""Share of the memory that training leaves, for the keys and values of the running batch; stored prefixes take half
as much."""


@dataclass(slots=True, eq=False)
class _Row:
    """A request: waiting, or running in one slot of the cache of number `cache`.

    `cached` tokens are in its slot, of which the tree has the first `stored`, up to the end of `prefix`, which is
    pinned.
    """

    request_id: int
    policy: str
    prompt: IntArray
    sampling: Sampling
    stream: bool
    limit: int
    uniforms: UniformStream
    stop_ids: frozenset[int]
    stop_texts: StopTexts | None
    owner: str | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    cache: int = 0
    cached: int = 0
    reused: int | None = None
    stored: int = 0
    prefix: PrefixNode | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    answer: HeldAnswer | None = None

    @property
    def ids(self) -> IntArray:
        """Prompt and what was sampled, int32."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)]) if self.tokens else self.prompt

    @property
    def longest(self) -> int:
        """The most tokens of keys and values that it can hold."""
        return self.prompt.size + self.limit


class LocalEngine:
    """Continuous batching over a Hugging Face causal language model. Synchronous; one thread.

    Args:
        model: a `PreTrainedModel` or a peft model, in eval mode; the engine only reads it.
        tokenizer: for stop texts.
        device: where the model is.
        max_context: longest prompt + answer, in tokens; less where the model is exact up to less (`exact_context`).
        max_batch: at most this many rows at once; further requests wait.
        autocast: dtype that the learner computes in, if not the weights' own.
        prefix_cache_tokens: tokens of stored prefixes, of all policies together; None sizes it by the device's memory,
            0 stores none.
        adapters: of the policies on the model; None when the model is one policy.
        trained: the model in training, where that is not `model`; memory is left for both.

    Attributes:
        grammars: of the model, for answers that are held to schemas.
        computed_tokens: prompt tokens that were computed, those of requests that were computed anew included.
        reused_tokens: prompt tokens whose keys and values were stored.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        device: torch.device,
        max_context: int,
        max_batch: int = 64,
        autocast: torch.dtype | None = None,
        prefix_cache_tokens: int | None = None,
        adapters: Adapters | None = None,
        trained: Any = None,
    ) -> None:
        self._versions: dict[str, int] = {}
        self.max_batch = max_batch
        self.device = device
        self._chunk = CHUNK_TOKENS.get(device.type, CHUNK_TOKENS["cuda"])
        self._prefill_tokens = PREFILL_TOKENS.get(device.type, PREFILL_TOKENS["cpu"])
        # peft's wrapper adds a layer of calls; the adapters are modules inside the base model.
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._text = TokenText(tokenizer)
        self._adapters = adapters
        self.max_context = min(max_context, exact_context(base.config).tokens)
        self._slots = SlotModel(base, device, autocast, max_batch, adapters, context=self.max_context)
        self.vocabulary = int(base.get_input_embeddings().weight.shape[0])
        self.grammars = Grammars(tokenizer, self.vocabulary)
        available = max(0, _memory(device) - training_bytes(base, *([] if trained is None else [trained])))
        budget = int(MEMORY_SHARE * available) // self._slots.shape.bytes_per_token
        self._cache_tokens = max(budget, self.max_context)
        self._prefixes = PrefixTree(budget // 2 if prefix_cache_tokens is None else prefix_cache_tokens)
        self.computed_tokens = self.reused_tokens = 0
        self._waiting: deque[_Row] = deque()
        # Those in the first cache come first; a row's place among them is its slot.
        self._running: list[_Row] = []
        self._next: Tensor | None = None
        self._events: list[EngineEvent] = []
        self._began = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._running or self._waiting or self._events)

    def submit(
        self,
        request_id: int,
        prompt_ids: IntArray,
        sampling: Sampling,
        stream: bool = False,
        policy: str = DEFAULT_POLICY,
        owner: str | None = None,
        grammar: Compiled | None = None,
    ) -> None:
        """Queue a request. Its events carry `request_id`, which must not be in use; `stream` asks for `Tokens` events.
        Those of different owners are let in by turns. `grammar` is the one of `sampling`; None compiles that here.

        Raises:
            ContextLengthError: the prompt leaves no room for an answer.
            ConfigError: a sampling parameter out of range, or a schema that answers cannot be held to.
            EngineError: the prompt is empty or holds ids that the model does not have.
        """
        check_sampling(sampling)
        prompt = check_prompt(prompt_ids, self.max_context)
        if prompt.min() < 0 or prompt.max() >= self.vocabulary:
            raise EngineError(
                f"the prompt holds ids from {prompt.min()} to {prompt.max()}, the model has 0 to {self.vocabulary - 1}",
                hint="encode the prompt with the tokenizer of the model that is served",
            )
        if grammar is None and sampling.grammar:
            grammar = self.grammars.compiled(sampling.grammar)
        self._waiting.append(
            _Row(
                request_id,
                policy,
                prompt,
                sampling,
                stream,
                limit=min(sampling.max_tokens, self.max_context - prompt.size),
                uniforms=UniformStream(sampling.seed),
                stop_ids=frozenset(sampling.stop_token_ids),
                stop_texts=StopTexts(sampling.stop, self._text.decode) if sampling.stop else None,
                owner=owner,
                answer=grammar.begin() if grammar else None,
            )
        )

    def abort(self, request_id: int) -> None:
        """End a request; its `Finished` event has what was sampled so far. An unknown id is ignored."""
        for row in self._waiting:
            if row.request_id == request_id:
                self._waiting.remove(row)
                self._events.append(Finished(request_id, self._completion(row, "cancelled")))
                return
        for place, row in enumerate(self._running):
            if row.request_id == request_id:
                with torch.inference_mode():
                    self._leave({place: "cancelled"}, self._events)
                return

    def on_weights_changed(self, version: int, policy: str = DEFAULT_POLICY) -> None:
        """Serve a new version: what was computed with the old weights is dropped, running rows are computed anew."""
        self._versions[policy] = version
        self._prefixes.clear(policy)
        self._requeue()

    def drop_caches(self) -> None:
        """Give up the memory for keys and values; running rows continue from their tokens, computed anew."""
        self._prefixes.clear_all()
        self._requeue()

    def _requeue(self) -> None:
        self._waiting.extendleft(reversed(self._running))
        self._release_slots()

    def _release_slots(self) -> None:
        for row in self._running:
            self._pin(row, None)
        self._running = []
        self._next = None
        self._slots.release()

    def step(self) -> list[EngineEvent]:
        """Let waiting requests in, sample one token for every running row, and report.

        A failure ends the requests that it hit, not the engine.
        """
        events = self._events
        self._events = []
        self._began = time.perf_counter()
        with self._slots.computing():
            try:
                self._make_room()
                while self._waiting and self._admit(events):
                    pass
                if self._running:
                    self._decode(events)
            except RuntimeError as error:
                events.extend(
                    Failed(row.request_id, EngineError(f"the model failed: {error}", request=row.request_id))
                    for row in self._running
                )
                self._release_slots()
        return events

    def logprobs(self, token_ids: IntArray, temperature: float = 1.0, policy: str = DEFAULT_POLICY) -> FloatArray:
        """Log-probs of a fixed sequence by the way that sampling takes: float32 [T - 1], as the first of `scores`."""
        return self.scores(token_ids, temperature, policy)[0]

    def scores(
        self, token_ids: IntArray, temperature: float = 1.0, policy: str = DEFAULT_POLICY, top: int = 0
    ) -> tuple[FloatArray, IntArray, FloatArray]:
        """Log-probs of a fixed sequence by the way that sampling takes: prefill a part, decode the rest token by token.

        Without autocast, as `Learner.logprobs`, so that on float32 weights the two differ by float32 rounding alone.

        Args:
            token_ids: int [T], T >= 2.
            temperature: > 0.
            top: how many of the most likely tokens to report for each place.

        Returns:
            float32 [T - 1]: entry t is the log-prob of `token_ids[t + 1]`; int32 and float32 [T - 1, top]: the most
            likely tokens there, and their log-probs.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        split = max(1, ids.size - 1 - SCORED_STEPS)
        slots = SlotModel(self._slots.model, self.device, None, 1, self._adapters, like=self._slots)
        tokens = torch.from_numpy(ids).to(self.device)
        scored: list[tuple[Tensor, Tensor, Tensor]] = []

        def score(logits: Tensor, first: int) -> None:
            logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
            best = torch.topk(logprobs, top)
            chosen = logprobs.gather(1, tokens[first : first + len(logits), None])[:, 0]
            scored.append((chosen, best.indices, best.values))

        with slots.computing():
            number = slots.cache_for(ids.size)
            slots.caches[number].reserve(1, ids.size, 0)
            for start in range(0, split, self._prefill_tokens):
                part = ids[start : min(split, start + self._prefill_tokens)]
                score(slots.prefill(number, 0, [part], [start], [policy], keep=0)[0], start + 1)
            slots.begin_decode([split], [policy], [int(n == number) for n in range(number + 1)], [token_ids])
            for t in range(split, ids.size - 1):
                score(slots.decode(tokens[t : t + 1]), t + 1)
        chosen_T, top_ids_TK, top_TK = (torch.cat(parts).cpu().numpy() for parts in zip(*scored, strict=True))
        return chosen_T, top_ids_TK.astype(np.int32), top_TK

    # -- one step ---------------------------------------------------------------------------------------------------

    def _admit(self, events: list[EngineEvent]) -> bool:
        """Let waiting rows in as far as slots and memory reach, prefill them and sample their first token; whether any
        got in. Rows that share a prefix with one of them stay waiting until it is stored, so that one row computes it.
        """
        admissible: list[_Row] = []
        for row in itertools.islice(self._in_turn(), self.max_batch - len(self._running)):
            if self._full([*self._running, *admissible], row):
                break
            admissible.append(row)
        if not admissible:
            return False
        matches = {row.request_id: self._prefixes.match(row.policy, row.ids) for row in admissible}
        for row in admissible:
            row.cached = row.stored = sum(part.shape[2] for part in matches[row.request_id][1])
        newcomers = self._without_shared(admissible)
        chosen = {row.request_id for row in newcomers}
        self._waiting = deque(row for row in self._waiting if row.request_id not in chosen)

        newcomers.sort(key=lambda row: row.ids.size - row.cached)
        by_cache: dict[int, list[_Row]] = {}
        for row in newcomers:
            row.cache = self._slots.cache_for(row.ids.size + 1)
            by_cache.setdefault(row.cache, []).append(row)
        # All of them, before anything can fail: a failure ends the rows that run.
        firsts = {number: self._join(number, rows) for number, rows in by_cache.items()}
        logits = []
        for number, rows in sorted(by_cache.items()):
            for slot, row in enumerate(rows, start=firsts[number]):
                node, parts = matches[row.request_id]
                self._pin(row, node)
                self._slots.caches[number].write(slot, parts)
                self.computed_tokens += row.ids.size - row.cached
                self.reused_tokens += row.cached
                if row.reused is None:
                    row.reused = row.cached
            logits.append(self._prefill(firsts[number], rows))
        # The rows of an earlier cache come before those of a later one, here as there.
        self._sample([i for i, row in enumerate(self._running) if row.request_id in chosen], torch.cat(logits), events)
        return True

    def _join(self, number: int, rows: Sequence[_Row]) -> int:
        """Give the rows slots of the cache of that number; the first of these."""
        before = sum(row.cache < number for row in self._running)
        first = sum(row.cache == number for row in self._running)
        self._running[before + first : before + first] = rows
        self._next = None
        self._slots.caches[number].reserve(first + len(rows), max(row.ids.size for row in rows) + 1, first)
        return first

    def _slot(self, place: int) -> tuple[SlotCache, int]:
        """The cache of the running row in that place, and its slot there."""
        number = self._running[place].cache
        return self._slots.caches[number], place - sum(row.cache < number for row in self._running)

    def _full(self, rows: Sequence[_Row], another: _Row) -> bool:
        """Whether slots or memory are too few for another row beside these."""
        if len(rows) >= self.max_batch:
            return True
        lengths = [row.longest for row in (*rows, another)]
        needed = sum(lengths) if len(self._slots.caches) > 1 else len(lengths) * max(lengths)
        return bool(rows) and needed > self._cache_tokens

    def _in_turn(self) -> Iterator[_Row]:
        """The waiting rows, one of each owner in turn, those of the owners with the fewest running rows first."""
        if len(self._running) >= self.max_batch:
            return iter(())
        rows = Counter(row.owner for row in self._running)
        ranks = []
        for row in self._waiting:
            ranks.append(rows[row.owner])
            rows[row.owner] += 1
        return (row for _, row in sorted(zip(ranks, self._waiting, strict=True), key=itemgetter(0)))

    def _make_room(self) -> None:
        """For each owner that waits and has no running row, put back a row of the owner with the most of them, the one
        that has sampled least: what it has computed is mostly stored."""
        rows = Counter(row.owner for row in self._running)
        for owner, first in {row.owner: row for row in reversed(self._waiting)}.items():
            [(most, count)] = rows.most_common(1) or [(None, 0)]
            if count < 2:
                return
            if rows[owner] or not self._full(self._running, first):
                continue
            places = [place for place, row in enumerate(self._running) if row.owner == most]
            place = min(places, key=lambda place: len(self._running[place].tokens))
            row = self._running[place]
            self._store(*self._slot(place), row)
            self._vacate(place)
            self._waiting.appendleft(row)
            rows[most] -= 1
            rows[owner] += 1

    def _without_shared(self, rows: Sequence[_Row]) -> list[_Row]:
        """Those of the rows that compute no chunk which another of them computes, too."""
        if len(rows) < 2 or not self._prefixes.max_tokens:
            return list(rows)
        first: list[_Row] = []
        # Sorted by bytes, a row shares most with its neighbour.
        for row in sorted(rows, key=lambda row: (row.policy, row.ids.tobytes())):
            other = first[-1] if first and first[-1].policy == row.policy else None
            shared = 0 if other is None else min(common_prefix(other.ids, row.ids), row.ids.size - 1)
            if other is None or other.ids.size > self._prefixes.max_tokens or shared - row.cached < self._chunk:
                first.append(row)
        return first

    def _store(self, cache: SlotCache, slot: int, row: _Row) -> None:
        """Put the tokens that the row in a slot has computed since the last time into the tree, and pin them."""
        if row.prefix is None:
            return
        start = row.stored
        end = row.cached
        if start >= end:
            return
        node = self._prefixes.extend(row.prefix, row.ids[start:end], lambda: cache.read(slot, start, end))
        # What follows tokens that are not stored cannot be stored.
        self._pin(row, node)
        row.stored = end

    def _pin(self, row: _Row, prefix: PrefixNode | None) -> None:
        if prefix is not None:
            prefix.pins += 1
        if row.prefix is not None:
            row.prefix.pins -= 1
        row.prefix = prefix

    def _prefill(self, base: int, rows: Sequence[_Row]) -> Tensor:
        """Compute the rows in slots `base`.. of their cache up to their last token; the logits after it, [rows, V].

        Args:
            rows: those with the fewest tokens to compute first.
        """
        while longer := sum(row.ids.size - row.cached > self._chunk for row in rows):
            first = len(rows) - longer
            together = max(1, self._prefill_tokens // self._chunk)
            for at in range(first, len(rows), together):
                self._compute(base, rows, at, min(at + together, len(rows)))
        groups = list(_groups([row.ids.size - row.cached for row in rows], self._prefill_tokens))
        return torch.cat([self._compute(base, rows, first, last) for first, last in groups])

    def _compute(self, base: int, rows: Sequence[_Row], first: int, last: int) -> Tensor:
        """One pass over the next chunk of rows first..last-1; the logits that follow it."""
        part = rows[first:last]
        new = [row.ids[row.cached : row.cached + self._chunk] for row in part]
        starts = [row.cached for row in part]
        policies = [row.policy for row in part]
        number = part[0].cache
        logits = self._slots.prefill(number, base + first, new, starts, policies)[:, -1]
        for slot, (row, ids) in enumerate(zip(part, new, strict=True), start=base + first):
            row.cached += ids.size
            self._store(self._slots.caches[number], slot, row)
        return logits

    def _decode(self, events: list[EngineEvent]) -> None:
        """One more token for every running row but those that wait for their schemas."""
        pending = [row.answer.pending for row in self._running if row.answer and row.answer.pending]
        if len(pending) == len(self._running) and not wait(pending, MASK_SECONDS, FIRST_COMPLETED).done:
            return
        self._grow()
        if self._next is None:
            rows = self._running
            self._next = torch.tensor([row.tokens[-1] for row in rows], device=self.device)
            self._warp = Warp.of([row.sampling for row in rows], self.device)
            numbers = Counter(row.cache for row in rows)
            in_each = [numbers[number] for number in range(len(self._slots.caches))]
            # Those that their last rows have left give their memory back.
            for cache, n in zip(self._slots.caches, in_each, strict=True):
                if n == 0:
                    cache.release()
            lengths, policies, prompts = zip(*((row.cached, row.policy, row.prompt) for row in rows), strict=True)
            self._slots.begin_decode(lengths, policies, in_each, prompts)
        logits = self._slots.decode(self._next)
        for row in self._running:
            row.cached += 1
        self._next = self._sample(range(len(self._running)), logits, events, self._warp)

    def _grow(self) -> None:
        """Move rows whose next token does not fit into their cache to that of longer rows."""
        for place, row in reversed([*enumerate(self._running)]):
            if row.cached < self._slots.longest[row.cache]:
                continue
            cache, slot = self._slot(place)
            computed = cache.read(slot, 0, row.cached)
            self._close(place)
            row.cache = self._slots.cache_for(row.cached + 1)
            slot = self._join(row.cache, [row])
            self._slots.caches[row.cache].write(slot, [computed])

    def _sample(
        self, places: Sequence[int], logits: Tensor, events: list[EngineEvent], warp: Warp | None = None
    ) -> Tensor | None:
        """Draw the next token of the running rows in these places, let go those that end; the tokens [rows] if none
        did. Those for which it is not known in time what may come next are left out: their last token is fed again."""
        rows = [self._running[place] for place in places]
        warp = warp or Warp.of([row.sampling for row in rows], self.device)
        late: set[int] = set()
        if any(row.answer for row in rows):
            seconds = max(MASK_SECONDS, time.perf_counter() - self._began)
            bits_NW, late = self.grammars.bits_of([row.answer for row in rows], seconds)
            bits = torch.from_numpy(bits_NW).to(self.device)
            logits = logits.masked_fill(hidden(bits, self.vocabulary), torch.finfo(logits.dtype).min)
        distribution = warp.logprobs(logits)
        # A row that is left out draws this place's number later, like any other.
        uniforms = [0.0 if i in late else row.uniforms.next() for i, row in enumerate(rows)]
        drawn, drawn_logprobs = warp.draw(distribution, uniforms)
        ends: dict[int, StopReason | AglError] = {}
        for i, (place, row, token, logprob) in enumerate(
            zip(places, rows, drawn.tolist(), drawn_logprobs.tolist(), strict=True)
        ):
            if i in late:
                row.cached -= 1
                continue
            if row.answer is not None and (why := row.answer.error):
                ends[place] = _out_of_schema(why)
                continue
            if not math.isfinite(logprob):
                ends[place] = EngineError(
                    "the model's output is not finite",
                    hint="its weights have diverged: go back to an earlier checkpoint and lower the learning rate",
                    policy=row.policy,
                    version=self._version(row),
                )
                continue
            if not row.versions or row.versions[-1][1] != self._version(row):
                row.versions.append((len(row.tokens), self._version(row)))
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if row.sampling.top_logprobs:
                row.top.append(most_likely(distribution[i], row.sampling.top_logprobs))
            if row.stream:
                events.append(Tokens(row.request_id, [token], [logprob], row.top[-1:]))
            if token in row.stop_ids or (row.stop_texts is not None and row.stop_texts.add(token)):
                ends[place] = "stop"
            elif len(row.tokens) >= row.limit:
                ends[place] = "length"
            elif row.answer is not None:
                row.answer.add(token)
                if why := row.answer.error:
                    ends[place] = _out_of_schema(why)
        if ends:
            self._leave(ends, events)
        if late:
            self._next = None
        return None if ends or late else drawn

    def _leave(self, ends: Mapping[int, StopReason | AglError], events: list[EngineEvent]) -> None:
        """Report the running rows in these places, keep their prefixes, and close the gaps that they leave."""
        for place in sorted(ends, reverse=True):
            row = self._running[place]
            end = ends[place]
            if isinstance(end, AglError):
                events.append(Failed(row.request_id, end))
            else:
                events.append(Finished(row.request_id, self._completion(row, end)))
                self._store(*self._slot(place), row)
            self._vacate(place)

    def _vacate(self, place: int) -> None:
        """Take the running row in that place out."""
        self._pin(self._running[place], None)
        self._close(place)

    def _close(self, place: int) -> None:
        """Close the gap that the row in that place leaves in its cache with the cache's last row."""
        cache, slot = self._slot(place)
        number = self._running[place].cache
        end = sum(row.cache <= number for row in self._running) - 1
        last = self._running.pop(end)
        if end != place:
            cache.move(slot + end - place, slot, last.cached)
            self._running[place] = last
        self._next = None

    def _version(self, row: _Row) -> int:
        return self._versions.get(row.policy, 0)

    def _completion(self, row: _Row, reason: StopReason) -> Completion:
        if not row.versions:
            return empty_completion(self._version(row))
        tokens = np.asarray(row.tokens, np.int32)
        logprobs = np.asarray(row.logprobs, np.float32)
        versions = row.versions if len(row.versions) > 1 else ()
        return Completion(tokens, logprobs, reason, row.versions[0][1], row.top, row.reused or 0, versions)


def _out_of_schema(why: str) -> ConfigError:
    """The error of an answer that llguidance cannot go on with, though its beginning was within the limits."""
    return ConfigError(
        f"the answer could not be held to its schema: {why}", hint="simplify the schema: its patterns and repetitions"
    )


def _groups(widths: Sequence[int], tokens: int) -> Iterator[tuple[int, int]]:
    """Split rows by how many tokens they need into passes [first, last) of little padding and at most `tokens`."""
    first = 0
    for last in range(1, len(widths) + 1):
        widest = max(widths[first : last + 1])
        narrowest = min(widths[first : last + 1])
        if last == len(widths) or (last + 1 - first) * widest > tokens or widest > 2 * narrowest + 16:
            yield first, last
            first = last


def _memory(device: torch.device) -> int:
    """Bytes of memory that the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
