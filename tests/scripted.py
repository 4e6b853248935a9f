"""An engine that answers from a script: exact token ids of a real tokenizer, with made-up log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from agl.errors import ContextLengthError
from agl.mdp import IntArray
from agl.trainer.engine import Completion, OnTokens, Sampling


@dataclass(frozen=True)
class Asked:
    """One call of `generate`."""

    prompt_ids: IntArray
    sampling: Sampling
    session: str | None


Line = str | list[int] | Exception
"""What is answered: a text, token ids as they are, or an error."""


class ScriptedEngine:
    """Answers with the lines of a script, in order of arrival; the last line goes on for ever.

    A text is followed by the tokenizer's end token. `max_tokens` cuts an answer short, as in a real engine.

    Args:
        tokenizer: of Hugging Face.
        script: lines, or a function of what was asked.
        paused: wait for `resume.set()` after the first token of a stream, and before any other answer.

    Attributes:
        asked: every call, in order. cancelled: how many were. running: how many there are now, most at once: `peak`.
        version: the policy version reported.
    """

    def __init__(
        self,
        tokenizer: Any,
        script: Iterable[Line] | Callable[[Asked], Line],
        *,
        max_context: int = 4096,
        paused: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.asked: list[Asked] = []
        self.cancelled = self.running = self.peak = self.version = 0
        self.resume = asyncio.Event()
        if not paused:
            self.resume.set()
        self._answer = script if callable(script) else _in_order(script)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: Sampling,
        *,
        policy: str = "policy",
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        if prompt_ids.size >= self.max_context:
            raise ContextLengthError(f"the prompt has {prompt_ids.size} tokens")
        asked = Asked(prompt_ids, sampling, session)
        self.asked.append(asked)
        line = self._answer(asked)
        self.running += 1
        self.peak = max(self.peak, self.running)
        version = self.version
        try:
            if on_tokens is None:
                await self.resume.wait()
            if isinstance(line, Exception):
                raise line
            ids = [*self.encode(line), self.tokenizer.eos_token_id] if isinstance(line, str) else line
            finish = "length" if len(ids) > sampling.max_tokens else "stop"
            ids = ids[: sampling.max_tokens]
            for i, token in enumerate(ids):
                if on_tokens is not None:
                    on_tokens([token], [logprob(token, i)])
                    await asyncio.sleep(0)
                    await self.resume.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        top = [[(t, logprob(t, i) - k) for k in range(sampling.top_logprobs)] for i, t in enumerate(ids)]
        logprobs = np.asarray([logprob(t, i) for i, t in enumerate(ids)], np.float32)
        return Completion(np.asarray(ids, np.int32), logprobs, finish, version, top if sampling.top_logprobs else ())


def logprob(token: int, position: int) -> float:
    """A made-up log-prob that tells tokens and positions apart."""
    return -0.001 * (token + 1) - 0.1 * position


def _in_order(script: Iterable[Line]) -> Callable[[Asked], Line]:
    lines: Iterator[Line] = iter(script)
    last: list[Line] = []

    def answer(_: Asked) -> Line:
        last[:] = [next(lines, *last)]
        return last[0]

    return answer
