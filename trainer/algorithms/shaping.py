"""Terms that are added to a call's return, next to its rewards."""

from __future__ import annotations

from dataclasses import dataclass

from agl.errors import ConfigError
from agl.mdp.types import Transition
from agl.trainer.objectives.advantages import Shaping


@dataclass(frozen=True, slots=True)
class Overlong:
    """A penalty that grows linearly over the last `buffer` tokens before the longest answer allowed.

    Attributes:
        buffer: tokens, at least 1. penalty: of an answer of the longest length, above 0.

    Source: DAPO, arXiv 2503.14476, eq. 13; verl's `DAPORewardManager`.
    """

    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.buffer < 1 or not self.penalty > 0:
            raise ConfigError(f"overlong: buffer={self.buffer}, penalty={self.penalty}", hint="both must be above 0")

    def of(self, max_response_tokens: int) -> Shaping:
        """The penalty as a function of a call: -penalty * (tokens in the buffer) / buffer, at most 0."""
        free = max_response_tokens - self.buffer

        def shape(transition: Transition) -> float:
            over = transition.call.response_ids.size - free
            return -self.penalty * max(0, over) / self.buffer

        return shape
