"""Graders of agents that work together: the number of rounds, agreement, and cost in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from agl import semconv
from agl.errors import ConfigError
from agl.options import checked_options
from agl.rewards.trace import Trace, response_text
from agl.trainer.graders.fields import Extractor, Field, extract, failure, text_of
from agl.trainer.graders.text import squad
from agl.trainer.graders.tools import _OfTrace


@checked_options
@dataclass(frozen=True)
class Rounds(_OfTrace):
    """1 for at most `target` rounds, falling linearly to 0 at `limit`.

    The rounds of a conversation are the turns of the agent with the most turns. A turn is one run of an agent in which
    it asked a model, with any number of calls and tools.

    Attributes:
        target: the most rounds that grade 1.
        limit: the fewest rounds that grade 0; twice the target plus one if None.
        agents: the agents whose turns count: a name, glob, pattern, callable or several; all if None.
    """

    target: int = 1
    _: KW_ONLY
    limit: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.target < self._limit:
            raise ConfigError(f"Rounds({self.target!r}, limit={self.limit!r})", hint="1 <= target < limit")

    @property
    def _limit(self) -> int:
        return 2 * self.target + 1 if self.limit is None else self.limit

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """A value from 0 to 1.

        Raises:
            RewardError: outside a rollout.
        """
        rounds = max(self._spans(trace).turns.values(), default=0)
        return _falling(rounds, self.target, self._limit)


@checked_options
@dataclass(frozen=True, kw_only=True)
class Consensus(_OfTrace):
    """How far the agents agree in their last answers: the share of agents with the most common one, 0 to 1.

    With a single agent the value is 0. Answers are compared in SQuAD's normal form.

    Attributes:
        answers: the field of the output that holds the answers, as a list or as {agent: answer}; the last response of
            each agent's model, from its span, if None.
        pick: the part of an answer that is compared, such as `re.compile(r"Vote: (\\w+)")`; an answer without it agrees
            with no other. All of it if None.
        similarity: two answers are the same from this similarity on (rapidfuzz's ratio, 0 to 1).
        quorum: the grade is 1 if at least this share agrees, else 0; the share itself if None.
        agents: the agents whose answers count: a name, glob, pattern, callable or several; all if None.
    """

    needs = ("rapidfuzz",)

    answers: Field | None = None
    pick: Extractor | None = None
    similarity: float = 1.0
    quorum: float | None = None

    def __post_init__(self) -> None:
        for name in ("similarity", "quorum"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"Consensus({name}={value!r})", hint="more than 0, at most 1")

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """The share that agrees.

        Raises:
            RewardError: outside a rollout, or the responses were not captured.
        """
        parts = [extract(answer, self.pick) for answer in self._answers(output, trace)]
        answers = [squad(text_of(part)) for part in parts if part is not None]
        if len(parts) < 2 or not answers:
            return 0.0
        share = self._largest(answers) / len(parts)
        return share if self.quorum is None else float(share >= self.quorum - 1e-9)

    def _answers(self, output: Any, trace: Trace | None) -> list[Any]:
        if self.answers is not None:
            answers = extract(output, self.answers)
            if answers is None:
                return []
            return list(answers.values()) if isinstance(answers, Mapping) else list(answers)
        last = {call.agent: call for call in self._spans(trace).calls}
        texts = {agent: response_text(call) for agent, call in last.items()}
        silent = next((agent for agent, text in texts.items() if text is None), None)
        if silent is not None:
            raise failure(
                f"the spans do not hold the response of agent {silent!r}",
                hint="set capture_content=True and do not stream with a bare client, or use Consensus(answers=)",
            )
        return list(texts.values())

    def _largest(self, answers: list[str]) -> int:
        """The number of answers that are the same as the most common one."""
        if self.similarity == 1.0:
            return max(Counter(answers).values())
        from rapidfuzz import fuzz

        return max(sum(fuzz.ratio(a, b) >= 100 * self.similarity or a == b for b in answers) for a in answers)


@checked_options
@dataclass(frozen=True)
class TokenBudget(_OfTrace):
    """1 for at most `budget` tokens, falling linearly to 0 at `limit`.

    Attributes:
        budget: the most tokens of all LLM calls together that grade 1.
        limit: the fewest tokens that grade 0; twice the budget if None.
        count: "output" tokens, or "all" (with the whole prompt of each call).
        agents: the agents whose calls count: a name, glob, pattern, callable or several; all if None.
    """

    budget: int
    _: KW_ONLY
    limit: int | None = None
    count: Literal["output", "all"] = "output"

    def __post_init__(self) -> None:
        if self.count not in ("output", "all"):
            raise ConfigError(f"TokenBudget(count={self.count!r})", hint='"output" or "all"')
        if not 1 <= self.budget < self._limit:
            raise ConfigError(f"TokenBudget({self.budget!r}, limit={self.limit!r})", hint="1 <= budget < limit")

    @property
    def _limit(self) -> int:
        return 2 * self.budget if self.limit is None else self.limit

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """A value from 0 to 1.

        Raises:
            RewardError: outside a rollout, or a call that reports no usage.
        """
        names = (semconv.OUTPUT_TOKENS,) if self.count == "output" else (semconv.INPUT_TOKENS, semconv.OUTPUT_TOKENS)
        tokens = 0
        for call in self._spans(trace).calls:
            for name in names:
                if call.attributes.get(name) is None and call.status != "error":
                    raise failure(
                        f"an LLM call of agent {call.agent!r} reports no {name}",
                        hint="for a stream, request it: stream_options={'include_usage': True}",
                    )
                tokens += int(call.attributes.get(name) or 0)
        return _falling(tokens, self.budget, self._limit)


def _falling(value: float, target: float, limit: float) -> float:
    """1 up to `target`, 0 from `limit` on, linear in between."""
    return min(1.0, max(0.0, (limit - value) / (limit - target)))
