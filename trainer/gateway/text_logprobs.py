"""OpenAI's log-probs of a text completion: of each token, its text, log-prob, alternatives and place in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agl.mdp.types import FloatArray, IntArray
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.token_text import CONTEXT


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
        self._offset = 0

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
            self.json["text_offset"].append(self._offset)
            self._offset += len(text)
            known.append(token)
