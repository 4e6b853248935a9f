"""What was trained in a rollout, as data: calls, tokens, rewards, returns, advantages, rows, and why any forked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from agl import semconv
from agl.credit import Credit, Uniform, returns
from agl.errors import StoreError, UnreadableMessageError
from agl.mdp.builder import AttemptTrajectory, build_trajectory
from agl.mdp.faults import Fault
from agl.mdp.order import in_order
from agl.mdp.selection import Selection
from agl.mdp.sequence import merge
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call, Reward
from agl.messages import read
from agl.messages.write import to_openai
from agl.trainer.rendering.digests import digest
from agl.trainer.report.prices import cost
from agl.trainer.store.base import Store
from agl.trainer.store.types import Attempt, Rollout, TrainedCall


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A sampled token: its text, id, behaviour log-prob, and whether it was trained."""

    text: str
    id: int
    logprob: float
    trained: bool


@dataclass(frozen=True, slots=True, eq=False)
class CallReport:
    """One LLM call.

    Attributes:
        call: as the gateway recorded it; its policy is None where it is not trained.
        trained: what training did with it, if it was trained or dropped.
        return_: the return that it was trained with, or would be; None in an attempt that failed.
        continued: how many tokens of its prompt are an earlier call's, token for token.
        tokens: the sampled tokens.
        rewards: this call's own.
    """

    call: Call
    trained: TrainedCall | None
    return_: float | None
    continued: int
    tokens: Sequence[TokenReport]
    rewards: Sequence[Reward]

    @property
    def fork(self) -> str | None:
        """Cause and detail, if the conversation could not be continued token for token."""
        cause = self.call.fork_cause
        detail = self.call.request.get("fork_detail")
        return f"{cause}: {detail}" if cause and detail else cause

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The new messages of the request."""
        return self.call.request.get("messages", [])

    def facts(self) -> dict[str, Any]:
        """The call as JSON values; tokens and rewards are left to the reader of them."""
        call = self.call
        trained = self.trained
        return {
            "id": call.id,
            "index": call.index,
            "agent": call.agent,
            "policy": call.policy,
            "policy_version": call.policy_version,
            "finish_reason": call.finish_reason,
            "temperature": call.temperature,
            "prompt_tokens": call.prompt_ids.size,
            "continued": self.continued,
            "parent": call.parent_id,
            "fork": self.fork,
            "messages": list(self.messages),
            "reply": dict(call.response),
            "tokens": (),
            "rewards": (),
            "return_": self.return_,
            "advantage": trained.advantage if trained else None,
            "step": trained.step if trained else None,
            "sequence": trained.sequence if trained else None,
            "dropped": trained.dropped if trained else None,
            "error": call.error,
        }

    def to_json(self) -> dict[str, Any]:
        """The call as JSON values."""
        tokens = map(asdict, self.tokens)
        rewards = map(asdict, self.rewards)
        return self.facts() | {"tokens": list(tokens), "rewards": list(rewards)}


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """A call that another model answered, as its span has it; messages in the form of Chat Completions.

    Attributes:
        agent: that made it.
        model: that answered.
        messages: those that the same agent's call before did not have.
        reply: None of a call that failed.
        error: of the call, or why its messages cannot be read.
        cost: in US dollars; None where the price is not known (`agl.trainer.report.prices`).
    """

    agent: str
    model: str | None
    messages: Sequence[Mapping[str, Any]]
    reply: Mapping[str, Any] | None
    error: str | None
    cost: float | None


@dataclass(frozen=True, slots=True)
class RowReport:
    """A merged row: the policy that it trains, the calls in it (by index), its tokens, how many of them are trained,
    and whether it branches."""

    policy: str
    calls: list[int]
    tokens: int
    trained: int
    unmerged_tokens: int
    is_chain: bool


@dataclass(frozen=True, slots=True, eq=False)
class RolloutReport:
    """What is known of a rollout and one of its attempts.

    Attributes:
        rollout: as stored.
        attempts: all of its attempts.
        output: what the agent returned, as text.
        rewards: the rollout's own.
        total_reward: the sum of all primary rewards; None without any.
        calls, rows, tools: of the attempt; a tool call is a dict of `name`, `tool_call_id`, `arguments`, `result`,
            `status` and `error`.
        provider_calls: calls that other models answered, of which no tokens are known.
        fault: why the attempt ended with an exception that a policy caused; None if it did not.
    """

    rollout: Rollout
    attempts: Sequence[Attempt]
    output: str | None
    rewards: Sequence[Reward]
    total_reward: float | None
    calls: Sequence[CallReport]
    rows: Sequence[RowReport]
    tools: Sequence[dict[str, Any]]
    provider_calls: Sequence[ProviderCall] = ()
    fault: Fault | None = None

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.rollout.rollout_id

    @property
    def cost(self) -> float | None:
        """US dollars of the other models' calls whose price is known (`n_priced` of them); None if that is none."""
        known = [call.cost for call in self.provider_calls if call.cost is not None]
        return sum(known) if known else None

    @property
    def n_priced(self) -> int:
        """How many of the other models' calls have a known price."""
        return sum(call.cost is not None for call in self.provider_calls)

    @property
    def forks(self) -> dict[str, int]:
        """Cause -> how many conversations could not be continued token for token."""
        return dict(Counter(call.call.fork_cause for call in self.calls if call.call.fork_cause).most_common())

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "rollout_id": self.rollout_id,
            "status": self.rollout.status,
            "mode": self.rollout.mode,
            "step": self.rollout.step,
            "task": self.rollout.task,
            "output": self.output,
            "attempts": [{"attempt": a.attempt, "status": a.status, "error": a.error} for a in self.attempts],
            "rewards": [asdict(reward) for reward in self.rewards],
            "total_reward": self.total_reward,
            "calls": [call.to_json() for call in self.calls],
            "rows": [asdict(row) for row in self.rows],
            "forks": self.forks,
            "tools": list(self.tools),
            "provider_calls": [asdict(call) for call in self.provider_calls],
            "cost": self.cost,
            "policy_fault": None if self.fault is None else asdict(self.fault),
        }


async def describe(
    store: Store, rollout_id: str, *, attempt: int | None = None, credit: Credit | None = None
) -> RolloutReport:
    """The report on an attempt of a rollout; the last attempt if `attempt` is None.

    Raises:
        StoreError: no such rollout or attempt.
    """
    rollout = await store.get_rollout(rollout_id)
    attempts = await store.query_attempts(rollout.rollout_id)
    if not attempts:
        raise StoreError("the rollout has not been tried yet", rollout=rollout.rollout_id)
    chosen = attempts[-1] if attempt is None else next((a for a in attempts if a.attempt == attempt), None)
    if chosen is None:
        numbers = ", ".join(str(a.attempt) for a in attempts)
        raise StoreError(f"the rollout has attempts {numbers}, not {attempt}", rollout=rollout.rollout_id)
    calls = await store.query_calls(rollout.rollout_id, chosen.attempt)
    spans = await store.query_spans(rollout.rollout_id, chosen.attempt)
    trained = {t.call_id: t for t in await store.query_trained_calls(rollout.rollout_id)}
    everyone = Selection(tuple((c.agent, c.policy) for c in calls if c.policy is not None))
    attempt_trajectory = build_trajectory(
        rollout.rollout_id, chosen.attempt, rollout.group, SpanIndex(calls, spans), everyone
    )
    transitions = attempt_trajectory.trajectory.transitions
    # A rule is about the whole rollout, whatever the policies: one that compares agents needs all of them. What an
    # attempt that failed earned is never credited.
    succeeded = chosen.status == "succeeded"
    credited = returns(credit or Uniform(), attempt_trajectory.trajectory) if succeeded else [None] * len(transitions)
    value = {t.call.id: r for t, r in zip(transitions, credited, strict=True)}
    trainable = {t.call.id for t in transitions if t.trainable}
    by_id = {c.id: c for c in calls}
    decoders = {policy: _decoder(rollout, policy) for policy in {c.policy for c in calls}}

    def report(call: Call) -> CallReport:
        record, parent, decode = trained.get(call.id), by_id.get(call.parent_id or ""), decoders[call.policy]
        kept = call.id in trainable and (record is None or record.dropped is None)
        return CallReport(
            call,
            record,
            return_=record.return_ if record else value.get(call.id),
            continued=parent.ids.size if parent else 0,
            tokens=[
                TokenReport(decode(i), i, logprob, kept)
                for i, logprob in zip(call.response_ids.tolist(), call.logprobs.tolist(), strict=True)
            ],
            rewards=[r for r, call_id in attempt_trajectory.credited if call_id == call.id],
        )

    root = next((s for s in spans if s.parent_id is None), None)
    output = root.attributes.get(semconv.OUTPUT) if root else None
    recorded = {c.span_id for c in calls}
    return RolloutReport(
        rollout,
        attempts,
        output=None if output is None else str(output),
        rewards=[r for r, call_id in attempt_trajectory.credited if call_id is None],
        total_reward=attempt_trajectory.reward,
        calls=[report(call) for call in calls],
        rows=_rows(attempt_trajectory, by_id, trained),
        tools=[_tool(s) for s in spans if s.is_tool_run],
        provider_calls=_provider_calls([s for s in spans if s.operation == semconv.CHAT and s.span_id not in recorded]),
        fault=attempt_trajectory.fault,
    )


def _provider_calls(chats: Sequence[Span]) -> list[ProviderCall]:
    before: dict[str, list[bytes]] = {}
    provider_calls = []
    for span in in_order(chats):
        agent = span.agent or ""
        error = span.status_message if span.status == "error" else None
        sent: list[dict[str, Any]] = []
        reply: dict[str, Any] | None = None
        try:
            sent = to_openai(read.sent(span), text_only=False)
            reply = next(iter(to_openai(read.said(span), text_only=False)), None)
        except UnreadableMessageError as unreadable:
            error = error or str(unreadable)
        digests = [digest(message) for message in (*sent, *([reply] if reply else ()))]
        pairs = zip(digests[: len(sent)], before.get(agent, ()), strict=False)
        known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        before[agent] = digests
        model = span.attributes.get(semconv.RESPONSE_MODEL) or span.attributes.get(semconv.REQUEST_MODEL)
        provider_calls.append(ProviderCall(agent, model, sent[known:], reply, error, cost(span)))
    return provider_calls


def _rows(
    attempt_trajectory: AttemptTrajectory, calls: Mapping[str, Call], trained: Mapping[str, TrainedCall]
) -> list[RowReport]:
    """The training rows of each policy; advantages are of no matter for their shape."""
    rows = []
    for policy, trajectory in attempt_trajectory.trajectories.items():
        for row in merge(trajectory, dict.fromkeys((t.call.id for t in trajectory.transitions), 0.0)):
            merged = [calls[call_id] for call_id in row.call_ids]
            unmerged = sum(call.ids.size for call in merged)
            tokens = sum(trained[id].tokens for id in row.call_ids if id in trained) if trained else row.n_actions
            rows.append(RowReport(policy, [c.index for c in merged], len(row), tokens, unmerged, row.is_chain))
    return rows


def _tool(span: Span) -> dict[str, Any]:
    return {
        "name": span.attributes.get(semconv.TOOL_NAME),
        "tool_call_id": span.attributes.get(semconv.TOOL_CALL_ID),
        "arguments": span.attributes.get(semconv.TOOL_CALL_ARGUMENTS),
        "result": span.attributes.get(semconv.TOOL_CALL_RESULT),
        "status": span.status,
        "error": span.status_message,
    }


def _decoder(rollout: Rollout, policy: str | None) -> Callable[[int], str]:
    """id -> text, by the tokenizer of the policy's model; `<id>` where it is not at hand."""
    models = rollout.metadata.get("models") or {}
    path = Path(str(models.get(policy, rollout.metadata.get("model", "")))) / "tokenizer.json"
    if not path.is_file():
        return lambda i: f"<{i}>"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda i: tokenizer.decode([i], skip_special_tokens=False)
