"""OpenAI's log-probs of a text completion: of each token, its text, log-prob, alternatives and place in the text.

Invariant: a token's place is that of its first character in the whole text, also where several tokens make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agl.mdp.types import FloatArray, IntArray
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.token_text import CONTEXT

REST = 3
"""No character has more bytes after its first, and so more tokens."""


class TextLogprobs:
    """Log-probs that are added in the order of the text.

    Args:
        rendering: of the policy.

    Attributes:
        json: them, as the API has them.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.json: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._rendering = rendering
        self._length = 0
        """Of the text so far, in characters, with what stands for an unfinished one."""

    def add(
        self, before: IntArray | list[int], ids: IntArray, values: FloatArray | Sequence[Any], tops: Sequence[Any]
    ) -> None:
        """Add tokens that follow others. `values`, `tops`: their log-probs, and (token, log-prob) of the most likely
        ones in their places; None for the first token of all, which nothing comes before."""
        known = [*np.asarray(before, np.int32)[-CONTEXT:].tolist()]
        for k, (token, value) in enumerate(zip(ids.tolist(), values, strict=True)):
            at = known[-CONTEXT:]
            text = self._rendering.decode_after(at, [token])
            top: Sequence[tuple[int, float]] | None = tops[k] if k < len(tops) else ()
            self.json["tokens"].append(text)
            self.json["token_logprobs"].append(None if value is None else float(value))
            likely = None
            if top is not None:
                # Of several tokens with the same text, the most likely one counts.
                likely = {self._rendering.decode_after(at, [i]): float(v) for i, v in reversed(top)}
                likely.setdefault(text, self.json["token_logprobs"][-1])
            self.json["top_logprobs"].append(likely)
            before_it = self._rendering.decode(at)
            settled = self._rendering.decode([*at, *ids[k : k + 1 + REST].tolist()])
            self.json["text_offset"].append(self._length - len(before_it) + _in_common(before_it, settled))
            self._length += len(self._rendering.decode([*at, token])) - len(before_it)
            known.append(token)

    def end_at(self, size: int) -> None:
        """Remove the tokens that begin after the first `size` characters."""
        count = sum(offset < size for offset in self.json["text_offset"])
        for values in self.json.values():
            del values[count:]


def _in_common(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return next((k for k, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
