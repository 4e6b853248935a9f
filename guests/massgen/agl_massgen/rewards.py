"""The rewards of MassGen's RL document, out of agl's graders (docs/rewards.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agl import semconv
from agl.mdp.spans import Span
from agl.rewards import Consensus, Depth, FuzzyMatch, Rounds, Structure, TokenBudget, ToolSuccess
from agl.rewards.trace import Trace as Attempt
from agl_massgen.files import RewardSpan, ToolSpan


class RewardComputer:
    """Computes reward signals.

    Args:
        rounds: of a coordination, up to which none is penalised.
        tokens: sampled in all, likewise.
    """

    def __init__(self, *, rounds: int = 2, tokens: int = 4000) -> None:
        self._rounds, self._tokens = Rounds(rounds), TokenBudget(tokens)

    def tool(self, span: ToolSpan) -> RewardSpan:
        """+1 for a tool call that succeeded, -1 for one that failed or says so, -0.5 for an empty result."""
        result = "" if span.result is None else span.result
        facts = {
            semconv.OPERATION_NAME: semconv.EXECUTE_TOOL,
            semconv.TOOL_NAME: span.tool_name,
            semconv.TOOL_CALL_RESULT: result if isinstance(result, str) else json.dumps(result, default=str),
        }
        status = "ok" if span.error is None else "error"
        called = Span("", "", None, "", 1, span.tool_name, span.timestamp, span.timestamp, status, attributes=facts)
        value = ToolSuccess(failure=-1.0, empty=-0.5)(None, None, Attempt("", 1, "", (called,)))
        return RewardSpan(value, "tool", span.error or {1.0: "succeeded", -0.5: "empty result"}.get(value, "failed"))

    def answer(self, answer: str, reference: str | None = None) -> RewardSpan:
        """The quality of an answer, 0 to 1: structure up to 0.3, depth up to 0.4, likeness to a reference up to 0.3.

        Raises:
            ConfigError: a package of `agl[rewards]` is missing.
        """
        parts = {"structure": 0.3 * Structure()(None, answer), "depth": 0.4 * Depth()(None, answer)}
        if reference is not None:
            parts["similarity"] = 0.3 * FuzzyMatch(scorer="token_set")({"answer": reference}, answer)
        return RewardSpan(sum(parts.values()), "answer_quality", _told(parts))

    def coordination(
        self, attempt: Attempt, votes: Mapping[str, str], answer: str, reference: str | None = None
    ) -> RewardSpan:
        """How well agents worked together, -2 to 3: rounds up to 1, twice the answer's quality, 1.5 for a consensus of
        all votes, tokens up to 0.5; less 2, so that two rounds, an answer of quality 0.75 and a consensus are +2.5.

        Args:
            attempt: its spans are counted. A round is a run of an agent in which it asked a model; tokens of calls
                that report none are not counted.
            votes: agent -> the agent that it voted for.
            answer: the final one.
        """
        reporting = {s.span_id for s in attempt.spans if s.attributes.get(semconv.OUTPUT_TOKENS) is not None}
        calls = tuple(s for s in attempt.spans if s.operation != semconv.CHAT or s.span_id in reporting)
        counted = Attempt(attempt.rollout_id, attempt.attempt, attempt.agent, calls)
        quorum = Consensus(answers="votes", quorum=1.0)(None, {"votes": dict(votes)})
        parts = {
            "rounds": self._rounds(None, None, attempt),
            "quality": 2 * self.answer(answer, reference).reward,
            "consensus": 1.5 * quorum,
            "tokens": 0.5 * self._tokens(None, None, counted),
        }
        return RewardSpan(sum(parts.values()) - 2.0, "coordination", _told(parts))

    def voting(self, voter: str, voted_for: str, winner: str) -> RewardSpan:
        """1 for a vote for the agent that was selected, else 0; the voter's own."""
        right = voted_for == winner
        return RewardSpan(float(right), "voting", f"voted for {voted_for}, selected was {winner}", voter)


def _told(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
