"""What training made of the calls of coding agents, in numbers: how much was kept, and what was lost on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agl.trainer.run.trainer import Result
from agl.trainer.store.base import Store
from agl.trainer.store.location import read_store

_DRIFT = "learner/max_abs_log_ratio"


@dataclass(eq=False)
class AgentCalls:
    """The calls of one agent that policies answered, in the rollouts of a training that succeeded.

    Attributes:
        agent: its name.
        rollouts, calls: how many.
        forks: cause -> calls that did not continue the one before token
            for token, as `agl explain` names it.
        sampled, trained: tokens of the answers.
        dropped: reason -> tokens that were left out for it.
        drift: the largest difference, in nats, between the log-probability that a token was sampled with and the one
            that it was trained on; None where nothing was.
    """

    agent: str
    rollouts: int = 0
    calls: int = 0
    forks: Counter[str] = field(default_factory=Counter[str])
    sampled: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    drift: float | None = None

    @property
    def lost(self) -> int:
        """Sampled tokens that were neither trained nor left out for a reason."""
        return self.sampled - self.trained - self.dropped.total()


def agents(result: Result) -> list[AgentCalls]:
    """What a training made of each agent's calls.

    Raises:
        StoreError: its store cannot be read.
    """
    # With more than one update of a step the ratio is what was learnt, too.
    drifts = [float(v) for entry in result.history for k, v in entry.items() if k.endswith(_DRIFT)]

    async def query(store: Store) -> list[AgentCalls]:
        found: dict[str, AgentCalls] = {}
        for rollout in await store.query_rollouts(run_id=result.run_id, mode="train", status=["succeeded"]):
            records = {record.call_id: record for record in await store.query_trained_calls(rollout.rollout_id)}
            calls = [c for c in await store.query_calls(rollout.rollout_id, rollout.attempts) if c.policy is not None]
            for call in calls:
                agent = found.setdefault(call.agent, AgentCalls(call.agent, drift=max(drifts, default=None)))
                record = records.get(call.id)
                size = call.response_ids.size
                agent.calls = agent.calls + 1
                agent.sampled = agent.sampled + size
                agent.forks.update([call.fork_cause] if call.fork_cause else [])
                if record is not None:
                    agent.trained += record.tokens
                    agent.dropped.update({record.dropped: size} if record.dropped else {})
                elif call.error is not None:  # no transition: the program got an error, or did not wait for the answer
                    agent.dropped.update({"its call failed": size} if size else {})
            for name in {call.agent for call in calls}:
                found[name].rollouts += 1
        return sorted(found.values(), key=lambda agent: agent.agent)

    return read_store(result.store, query)


def table(found: Sequence[AgentCalls]) -> str:
    """The same as a table in Markdown."""
    lines = ["| agent | rollouts | calls | forks | tokens sampled | trained | left out | lost | drift, nats |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for one in found:
        forks, dropped = (", ".join(f"{n} {what}" for what, n in c.items()) or "0" for c in (one.forks, one.dropped))
        drift = "" if one.drift is None else f"{one.drift:.1e}"
        numbers = (one.agent, one.rollouts, one.calls, forks, one.sampled, one.trained, dropped, one.lost, drift)
        lines.append(f"| {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)
