"""An engine with continuous batching: rows decode together, prompts go first, keys and values take room.

Invariant: each row that runs gains one token an iteration; a call is neither dropped nor served twice.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of each iteration; of reading all weights in it, or those of one row (fewer in a mixture of experts); of
    computing a row meanwhile; of each token in the conversations; of each new prompt token, and pair of these."""

    iteration: float = 0.0
    read: float = 0.0
    read_row: float = 0.0
    row: float = 0.0
    context: float = 0.0
    prefill: float = 0.0
    attention: float = 0.0

    def prompt(self, cached: float, tokens: float) -> float:
        """Seconds of a prompt whose first tokens are cached."""
        return self.prefill * (tokens - cached) + self.attention * (tokens**2 - cached**2) / 2


class _Call(NamedTuple):
    conversation: int
    prompt: int
    sampled: int
    group: int
    shared: int
    done: asyncio.Future[None]


class Engine:
    """Serves calls in their order, as far as there is `room` (tokens of keys and values). Conversations that wait for a
    tool stay cached until others need the room; the oldest goes first. What a group's conversations begin with is
    computed once, and takes each one's room. `busy` are seconds of work so far, `sampled` and `computed` tokens of
    answers, and of prompts that were not cached.
    """

    def __init__(self, pace: Pace, room: float = math.inf) -> None:
        self.pace = pace
        self._room = room
        self.busy = 0.0
        self.sampled = 0
        self.computed = 0
        self._speed = 1.0
        self._at = 0.0
        self._done = 0.0
        self._backlog = 0.0
        self._running: list[tuple[float, int, _Call]] = []
        self._waiting: deque[_Call] = deque()
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._begun: set[int] = set()
        self._held = 0
        self._kept = 0
        self._offsets = 0.0
        self._served = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._turn)

    def share(self, speed: float) -> None:
        """Give the engine this share of its device from now on; with 0 it sleeps."""
        self.advance()
        self._speed = speed
        self._plan()

    async def sample(self, conversation: int, prompt: int, sampled: int, group: int = 0, shared: int = 0) -> None:
        """Return when a conversation of `prompt` tokens, which `group` has the first `shared` of in common, has its
        `sampled` next ones."""
        self._waiting.append(call := _Call(conversation, prompt, sampled, group, shared, self._loop.create_future()))
        self._plan()
        await call.done

    def updated(self, *, rebuild: bool) -> None:
        """The weights have changed: cached conversations are void; with `rebuild`, running ones are computed again."""
        self.advance()
        self._cached, self._kept, self._begun = OrderedDict(), 0, set()
        for end, _, call in self._running if rebuild else ():
            self._backlog += self.pace.prompt(self._shared(call), call.prompt + call.sampled + self._done - end)

    def _shared(self, call: _Call) -> int:
        """Tokens of a call's prompt that the present weights have computed for another of its group."""
        computed = call.shared if call.group in self._begun else 0
        self._begun.add(call.group)
        return computed

    def _plan(self) -> None:
        """Look once when all that happens at this moment has happened."""
        self._timer.cancel()
        self._timer = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.advance()
        while self._waiting and self._admit(self._waiting[0]):
            self._waiting.popleft()
        if (self._running or self._backlog) and self._speed:
            # Conversations grow, and iterations with them.
            left = min(self._running[0][0] - self._done, 256) * self._iteration() if self._running else 0.0
            # Late in a long run the clock does not see less than an ulp.
            wait = max((self._backlog + left) / self._speed, math.ulp(self._loop.time()))
            self._timer = self._loop.call_later(wait, self._turn)

    def _iteration(self) -> float:
        pace = self.pace
        rows = len(self._running)
        weights = max(min(pace.read, pace.read_row * rows), pace.row * rows)
        return max(pace.iteration + weights + pace.context * (self._offsets + rows * self._done), 1e-12)

    def advance(self) -> None:
        """Bring the work up to now, and end the calls that have all their tokens."""
        work = (self._loop.time() - self._at) * self._speed
        self._at = self._loop.time()
        if self._running or self._backlog:
            self.busy += work
            prefill = min(work, self._backlog)
            self._backlog = max(0.0, self._backlog - prefill - 1e-12)
            if self._running:
                self._done = min(self._done + (work - prefill) / self._iteration(), self._running[0][0])
        while self._running and self._running[0][0] <= self._done + 1e-6:
            end, _, call = heapq.heappop(self._running)
            tokens = self._cached[call.conversation] = call.prompt + call.sampled
            self._held = self._held - tokens
            self._kept = self._kept + tokens
            self._offsets -= tokens - end
            self.sampled += call.sampled
            call.done.set_result(None)

    def _admit(self, call: _Call) -> bool:
        """Begin a call if there is room beside those that run."""
        tokens = call.prompt + call.sampled
        if self._held + tokens > self._room and self._running:
            return False
        cached = self._cached.pop(call.conversation, 0)
        self._kept -= cached
        while self._cached and self._held + self._kept + tokens > self._room:
            self._kept -= self._cached.popitem(last=False)[1]
        cached = max(cached, self._shared(call))
        self._held = self._held + tokens
        self._served = self._served + 1
        self.computed += call.prompt - cached
        self._backlog += self.pace.prompt(cached, call.prompt)
        self._offsets += call.prompt - self._done
        heapq.heappush(self._running, (self._done + call.sampled, self._served, call))
        return True
