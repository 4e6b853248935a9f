"""Calls and spans become trajectories; every call, reward and bypass is accounted for. Joined by ids, never by time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agl import semconv
from agl.errors import BypassedGatewayError, LostCallError, NoAgentMatchedError, NoLLMCallError
from agl.mdp.selection import Selection
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call, Reward, Trajectory, Transition


@dataclass(frozen=True, slots=True, eq=False)
class AttemptTrajectory:
    """What one attempt of a rollout came to.

    Attributes:
        trajectory: the transitions of every trained agent.
        rewards: every reward of the rollout, with the call it went to in `credited`.
        credited: (reward, call id or None for the whole trajectory).
        agents: every agent seen, in order of appearance, selected or not.
        failed_calls: selected calls that ended in an error, which cannot be trained.
        bypassed: `chat` spans of selected agents that no gateway call answers to.
        lost: those whose requests were sent to the gateway, but left no call there.
    """

    trajectory: Trajectory
    credited: tuple[tuple[Reward, str | None], ...]
    agents: tuple[str, ...]
    failed_calls: tuple[Call, ...]
    bypassed: tuple[Span, ...]
    lost: tuple[Span, ...] = ()

    @property
    def trajectories(self) -> dict[str, Trajectory]:
        """Policy -> its part of the trajectory, for each policy that sampled at least one call."""
        return {policy: self.trajectory.of(policy) for policy in self.trajectory.policies}

    @property
    def reward(self) -> float | None:
        """Sum of all primary rewards; None when there was none."""
        primary = [r.value for r, _ in self.credited if r.primary]
        return float(sum(primary)) if primary else None

    @property
    def unplaced(self) -> tuple[Reward, ...]:
        """AIR's rewards whose call is unknown, so that they count for the whole rollout."""
        return tuple(r for r, call_id in self.credited if call_id is None and r.source == "air")

    @property
    def n_calls(self) -> int:
        """How many transitions there are."""
        return len(self.trajectory.transitions)


def build(
    rollout_id: str,
    attempt: int,
    group: str,
    calls: Sequence[Call],
    spans: Sequence[Span],
    selection: Selection,
) -> AttemptTrajectory:
    """Join calls, spans and rewards of one attempt.

    A reward goes to the call that its span names (AIR's do), or to the one whose `chat` span it was emitted in, or to
    the call that issued the tool call it was emitted in; emitted in the span of an agent other than the outermost, to
    the last call made within that span; otherwise, and where it names the agent whose it is, to the whole trajectory.
    """
    join = SpanIndex(calls, spans)
    recorded = {c.id: c for c in calls}

    credited: list[tuple[Reward, str | None]] = []
    for span in spans:
        if span.operation != semconv.REWARD:
            continue
        attributes = span.attributes
        reward = Reward(
            str(attributes[semconv.REWARD_NAME]),
            float(attributes[semconv.REWARD_VALUE]),
            str(attributes.get(semconv.REWARD_SOURCE, "emit")),
            span.parent_id,
            bool(attributes.get(semconv.REWARD_PRIMARY, True)),
            agent=attributes.get(semconv.REWARD_AGENT),
        )
        named = attributes.get(semconv.REWARD_CALL)
        call = join.rewarded_call(span.parent_id) if named is None else recorded.get(str(named))
        # A call that failed is no transition: what it earned would be lost with it.
        trained = call is not None and call.policy is not None and call.error is None and reward.agent is None
        credited.append((reward, call.id if call is not None and trained else None))

    sampled = [c for c in calls if c.policy is not None and c.error is None]
    whole = tuple(r for r, call_id in credited if call_id is None)
    transitions = tuple(Transition(c, tuple(r for r, call_id in credited if call_id == c.id)) for c in sampled)
    trajectory = Trajectory(rollout_id, attempt, None, group, transitions, whole)

    answered = {c.span_id for c in calls}
    asked = [s for s in spans if s.operation == semconv.CHAT and not s.attributes.get(semconv.UNTRAINED)]
    unanswered = [
        s
        for s in asked
        if s.agent is not None and selection.policy_for(s.agent) is not None and s.span_id not in answered
    ]
    bypassed = tuple(s for s in unanswered if not s.attributes.get(semconv.ROUTED))
    lost = tuple(s for s in unanswered if s.attributes.get(semconv.ROUTED))
    agents = dict.fromkeys([c.agent for c in calls] + [s.agent for s in asked if s.agent is not None])
    failed = tuple(c for c in calls if c.policy is not None and c.error is not None)
    return AttemptTrajectory(trajectory, tuple(credited), tuple(agents), failed, bypassed, lost)


def check(built: AttemptTrajectory, selection: Selection, *, rollout_id: str, attempt: int) -> None:
    """Refuse a rollout that would train on nothing, and say why.

    Raises:
        BypassedGatewayError: a selected agent's call did not go through the gateway.
        LostCallError: a call that was sent left no record, or every call failed.
        NoLLMCallError: no LLM call was made.
        NoAgentMatchedError: calls were made, but by none of the selected agents.
    """
    where = {"rollout": rollout_id, "attempt": attempt}
    if built.bypassed:
        span = built.bypassed[0]
        raise BypassedGatewayError(
            f"{len(built.bypassed)} LLM call(s) of agent {span.agent!r} bypassed the gateway: "
            f"client {span.attributes.get(semconv.CLIENT, 'unknown')}, "
            f"URL {span.attributes.get(semconv.URL, 'unknown')}",
            hint="call the model through the openai or anthropic SDK, or point that client at the LLM resource "
            "(`llm: agl.LLM` -> llm.endpoint, llm.api_key)",
            span=span.span_id,
            **where,
        )
    if built.lost:
        span = built.lost[0]
        raise LostCallError(
            f"{len(built.lost)} LLM call(s) of agent {span.agent!r} went to the gateway, which has no record of them",
            hint="the gateway was not reached: see the exception that the agent got, on the span",
            span=span.span_id,
            **where,
        )
    if built.n_calls:
        return
    if built.failed_calls:
        first = built.failed_calls[0]
        raise LostCallError(
            f"every one of {len(built.failed_calls)} LLM call(s) failed; the first: {first.error}",
            hint="an agent that goes on without its model has nothing to train; let the error out, or fix its cause",
            agent=first.agent,
            **where,
        )
    if not built.agents:
        raise NoLLMCallError(
            "the agent made no LLM call",
            hint="check that it runs its model for this task; a client that is neither the openai nor the anthropic "
            "SDK must be pointed at the LLM resource (`llm: agl.LLM` -> llm.endpoint, llm.api_key)",
            **where,
        )
    raise NoAgentMatchedError(
        f"agents={selection} matched none of the agents that made calls: {', '.join(map(repr, built.agents))}",
        hint="use one of those names, a glob such as 'writ*', or leave agents= out to train all",
        **where,
    )
