"""Build an attempt's trajectory from its calls and spans, joined by ids, never by time.

Invariant: every call, reward and bypass of the attempt is accounted for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from agl import semconv
from agl.errors import (
    BypassedGatewayError,
    LostCallError,
    MisroutedCallError,
    NoAgentMatchedError,
    NoLLMCallError,
)
from agl.mdp.faults import Fault
from agl.mdp.selection import Selection
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call, Reward, Trajectory, Transition, without_superseded

CreditedReward = tuple[Reward, str | None]
"""A reward and the id of the call that earned it; None for the whole rollout."""


@dataclass(frozen=True, slots=True, eq=False)
class AttemptTrajectory:
    """One attempt of a rollout: its transitions, its rewards, and every call that cannot be trained.

    Attributes:
        trajectory: the transitions of every trained agent.
        credited: every reward of the rollout with the id of the call that earned it.
        agents: every agent that asked a model, in order of appearance, selected or not.
        failed_calls: selected calls that ended in an error, which cannot be trained.
        bypassed: `chat` spans of selected agents without a gateway call.
        misrouted: calls that a policy answered before it was known that the rule that selected them is another agent's
            name.
        lost: `chat` spans of requests that were sent to the gateway, which has no call for them.
        elsewhere: all `chat` spans that models other than a policy answered, those of judges included.
        fault: why it ended with an exception that a policy caused; None if it did not.
        seconds: where its time went (`SpanIndex.seconds`).
    """

    trajectory: Trajectory
    credited: tuple[CreditedReward, ...]
    agents: tuple[str, ...]
    failed_calls: tuple[Call, ...]
    bypassed: tuple[Span, ...]
    misrouted: tuple[Call, ...] = ()
    lost: tuple[Span, ...] = ()
    elsewhere: tuple[Span, ...] = ()
    fault: Fault | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

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
        """AIR's rewards without a known call; they count for the whole rollout."""
        return tuple(r for r, call_id in self.credited if call_id is None and r.source == "air")

    @property
    def n_calls(self) -> int:
        """Number of transitions."""
        return len(self.trajectory.transitions)

    def with_rewards(self, credited: Sequence[CreditedReward]) -> AttemptTrajectory:
        """The same attempt with further rewards, each at the call that earned it."""
        rewards: defaultdict[str | None, list[Reward]] = defaultdict(list)
        for reward, call_id in credited:
            rewards[call_id].append(reward)
        trajectory = replace(
            self.trajectory,
            transitions=tuple(
                replace(t, rewards=(*t.rewards, *rewards[t.call.id])) for t in self.trajectory.transitions
            ),
            rewards=(*self.trajectory.rewards, *rewards[None]),
        )
        return replace(self, trajectory=trajectory, credited=(*self.credited, *credited))


def build_trajectory(
    rollout_id: str, attempt: int, group: str, index: SpanIndex, selection: Selection
) -> AttemptTrajectory:
    """The trajectory of one attempt, from its calls, spans and rewards.

    A reward goes to the call that its span names (AIR's do), or to the one whose `chat` span it was emitted in, or to
    the call that issued the tool call it was emitted in; emitted in the span of an agent other than the outermost, to
    the last call made within that span. Every other reward, and one that names an agent, belongs to the whole
    trajectory.
    """
    selection = selection.knowing(index.agents)
    # A call that failed is no transition: a reward credited to it would be in no trajectory.
    sampled = {c.id: c for c in index.calls if c.policy is not None and c.error is None}

    credited: list[CreditedReward] = []
    for span in index.spans.values():
        reward = Reward.of_span(span.attributes, span.parent_id)
        if reward is None:
            continue
        if semconv.REWARD_CALL in span.attributes:
            call = sampled.get(str(span.attributes[semconv.REWARD_CALL]))
        else:
            call = index.rewarded_call(span.parent_id)
        placed = call is not None and call.id in sampled and reward.agent is None
        credited.append((reward, call.id if call is not None and placed else None))

    answered = {c.span_id for c in index.calls}
    # Clients that send no traceparent: the gateway has their calls, under the agent of the URL.
    to_gateway = f"/rollouts/{rollout_id}/attempts/{attempt}/"

    def is_elsewhere(span: Span) -> bool:
        return not span.attributes.get(semconv.ROUTED) and to_gateway not in str(span.attributes.get(semconv.URL))

    requests = [s for s in index.spans.values() if s.operation == semconv.CHAT]
    chats = [s for s in requests if not s.attributes.get(semconv.UNTRAINED)]
    unanswered = [
        s
        for s in chats
        if s.agent is not None and selection.policy_for(s.agent) is not None and s.span_id not in answered
    ]
    attempt_trajectory = AttemptTrajectory(
        Trajectory(rollout_id, attempt, None, group, tuple(map(Transition, sampled.values()))),
        credited=(),
        agents=tuple(dict.fromkeys([c.agent for c in index.calls] + [s.agent for s in chats if s.agent is not None])),
        failed_calls=tuple(c for c in index.calls if c.policy is not None and c.error is not None),
        bypassed=tuple(s for s in unanswered if is_elsewhere(s)),
        misrouted=tuple(
            c for c in index.calls if selection.names and c.policy not in (None, selection.policy_for(c.agent))
        ),
        lost=tuple(s for s in unanswered if s.attributes.get(semconv.ROUTED)),
        elsewhere=tuple(s for s in requests if s.span_id not in answered and is_elsewhere(s)),
        fault=Fault.of_spans(index.spans.values()),
        seconds=index.seconds(),
    )
    return attempt_trajectory.with_rewards(without_superseded(credited, itemgetter(0)))


def require_trainable(trajectory: AttemptTrajectory, selection: Selection) -> None:
    """Refuse an attempt that would train on nothing, and say why.

    Raises:
        MisroutedCallError: a policy answered an agent that is not selected.
        BypassedGatewayError: a selected agent's call did not go through the gateway.
        LostCallError: a call that was sent left no record, or every call failed.
        NoLLMCallError: no LLM call was made.
        NoAgentMatchedError: calls were made, but by none of the selected agents.
    """
    where = {"rollout": trajectory.trajectory.rollout_id, "attempt": trajectory.trajectory.attempt}
    if trajectory.misrouted:
        call = trajectory.misrouted[0]
        raise MisroutedCallError(
            f"agents={selection} was read as a pattern and selected agent {call.agent!r}, before an agent was seen "
            "that has this very name",
            hint="from now on it selects that agent alone, and the rollout is tried again; for a pattern, write "
            "re.compile(...)",
            agent=call.agent,
            call=call.id,
            **where,
        )
    if trajectory.bypassed:
        span = trajectory.bypassed[0]
        hint = (
            "call the model through the openai or anthropic SDK, or point that client at the LLM resource "
            "(`llm: agl.LLM` -> llm.endpoint, llm.api_key)"
        )
        if str(span.attributes.get(semconv.URL)).startswith(("ws:", "wss:")):
            hint = (
                "the gateway has no WebSockets: use HTTP, `client.responses.create(...)`; in the OpenAI Agents SDK, "
                '`set_default_openai_responses_transport("http")`'
            )
        raise BypassedGatewayError(
            f"{len(trajectory.bypassed)} LLM call(s) of agent {span.agent!r} bypassed the gateway: "
            f"client {span.attributes.get(semconv.CLIENT, 'unknown')}, "
            f"URL {span.attributes.get(semconv.URL, 'unknown')}",
            hint=hint,
            agent=span.agent,
            span=span.span_id,
            **where,
        )
    if trajectory.lost:
        span = trajectory.lost[0]
        raise LostCallError(
            f"{len(trajectory.lost)} LLM call(s) of agent {span.agent!r} went to the gateway, "
            "which has no record of them",
            hint="the gateway was not reached: see the exception that the agent got, on the span",
            span=span.span_id,
            **where,
        )
    if trajectory.n_calls:
        return
    if trajectory.failed_calls:
        first = trajectory.failed_calls[0]
        raise LostCallError(
            f"every one of {len(trajectory.failed_calls)} LLM call(s) failed; the first: {first.error}",
            hint="an agent that continues without its model has nothing to train; let the error propagate, or fix it",
            agent=first.agent,
            **where,
        )
    if not trajectory.agents:
        raise NoLLMCallError(
            "the agent made no LLM call",
            hint="check that it runs its model for this task; a client that is neither the openai nor the anthropic "
            "SDK must be pointed at the LLM resource (`llm: agl.LLM` -> llm.endpoint, llm.api_key)",
            **where,
        )
    raise NoAgentMatchedError(
        f"agents={selection} matched none of the agents that made calls: {', '.join(map(repr, trajectory.agents))}",
        hint="use one of those names, a glob such as 'writ*', or leave agents= out to train all",
        **where,
    )
