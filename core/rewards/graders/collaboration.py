"""Graders of agents that work together: how many rounds, do they agree, what did it cost?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from agl import semconv
from agl.errors import ConfigError, checked_options
from agl.rewards.graders.fields import Extractor, Field, extract, failure, text_of
from agl.rewards.graders.text import squad
from agl.rewards.graders.tools import _OfTrace
from agl.rewards.trace import Trace, said


@checked_options
@dataclass(frozen=True)
class Rounds(_OfTrace):
    """1 for at most `target` rounds, falling in a line to 0 at `limit`.

    The rounds of a conversation are the turns of the agent that had most of them; a turn is one run of an agent in
    which it asked a model, however many calls and tools that took.

    Attributes:
        target: rounds that are few enough. limit: rounds that are too many; twice the target and one if None.
        agents: whose turns count: a name, glob, pattern, callable or several; all if None.
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
        """1 to 0.

        Raises:
            RewardError: outside a rollout.
        """
        rounds = max(self._spans(trace).turns.values(), default=0)
        return _falling(rounds, self.target, self._limit)


@checked_options
@dataclass(frozen=True, kw_only=True)
class Consensus(_OfTrace):
    """How far the agents agree in their last answers: the share of them that hold the most common one, 0 to 1.

    One agent alone agrees with nobody, which is 0. Answers are compared in SQuAD's normal form.

    Attributes:
        answers: where in the output the answers are, as a list or as {agent: answer}; the last thing that each agent's
            model said, from its span, if None.
        pick: the part of an answer that is compared, such as `re.compile(r"Vote: (\\w+)")`; an answer without it agrees
            with none. All of it if None.
        similarity: from which likeness (rapidfuzz's ratio, 0 to 1) on two answers are the same.
        quorum: 1 if at least this share agrees, else 0; the share itself if None.
        agents: whose answers count: a name, glob, pattern, callable or several; all if None.
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
            RewardError: outside a rollout, or what the agents said was not captured.
        """
        picked = [extract(answer, self.pick) for answer in self._answers(output, trace)]
        given = [squad(text_of(one)) for one in picked if one is not None]
        if len(picked) < 2 or not given:
            return 0.0
        share = self._largest(given) / len(picked)
        return share if self.quorum is None else float(share >= self.quorum - 1e-9)

    def _answers(self, output: Any, trace: Trace | None) -> list[Any]:
        if self.answers is not None:
            found = extract(output, self.answers)
            if found is None:
                return []
            return list(found.values()) if isinstance(found, Mapping) else list(found)
        last = {call.agent: call for call in self._spans(trace).calls}
        texts = {agent: said(call) for agent, call in last.items()}
        silent = next((agent for agent, text in texts.items() if text is None), None)
        if silent is not None:
            raise failure(
                f"the spans do not hold what agent {silent!r} said",
                hint="capture_content=True, and no stream of a bare client; or Consensus(answers=) from the output",
            )
        return list(texts.values())

    def _largest(self, given: list[str]) -> int:
        if self.similarity == 1.0:
            return max(Counter(given).values())
        from rapidfuzz import fuzz

        alike = (sum(fuzz.ratio(a, b) >= 100 * self.similarity or a == b for b in given) for a in given)
        return max(alike)


@checked_options
@dataclass(frozen=True)
class TokenBudget(_OfTrace):
    """1 for at most `budget` tokens, falling in a line to 0 at `limit`.

    Attributes:
        budget: tokens of all LLM calls together. limit: tokens that are too many; twice the budget if None.
        count: "output" tokens, or "all" (prompts counted anew in each call).
        agents: whose calls count: a name, glob, pattern, callable or several; all if None.
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
        """1 to 0.

        Raises:
            RewardError: outside a rollout, or a call that tells no usage.
        """
        names = (semconv.OUTPUT_TOKENS,) if self.count == "output" else (semconv.INPUT_TOKENS, semconv.OUTPUT_TOKENS)
        tokens = 0
        for call in self._spans(trace).calls:
            for name in names:
                if call.attributes.get(name) is None and call.status != "error":
                    raise failure(
                        f"an LLM call of agent {call.agent!r} tells no {name}",
                        hint="a stream does if it is asked to: stream_options={'include_usage': True}",
                    )
                tokens += int(call.attributes.get(name) or 0)
        return _falling(tokens, self.budget, self._limit)


def _falling(value: float, full: float, none: float) -> float:
    """1 up to `full`, 0 from `none` on, a line between."""
    return min(1.0, max(0.0, (none - value) / (none - full)))
