"""What was measured of one policy: its rollouts as a store has them, and their numbers with error bounds."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agl import semconv
from agl.errors import DatasetError
from agl.mdp.faults import Fault
from agl.mdp.order import in_order
from agl.mdp.spans import Span
from agl.tracing.inferred import completed, totals
from agl.trainer.report import prices, statistics
from agl.trainer.report.trace_tree import error_line, line
from agl.trainer.run.results import reward_label
from agl.trainer.store.base import Store
from agl.trainer.store.types import Mode, RolloutSummary

IsSuccess = Callable[[RolloutSummary], bool]

TRANSCRIPT = 4_000
"""Maximum length of the text that is kept of a rollout, in characters."""
_READERS = 16
_PAGE = 256
_WHERE = re.compile(r" \((?:rollout|attempt|agent|step)=[^()]*\)$")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % interval. NaN where no rollout ended."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class EvaluatedRollout:
    """One rollout.

    Attributes:
        rollout_id: in the evaluation's store.
        task: the task's index in the dataset.
        reward: its total reward; None if it failed.
        success: whether that is a success; None if it failed.
        error: why it failed.
        rewards: by name, an agent's own under the agent's name.
        numbers: "calls" (of any model), "tokens" (sampled), "tools", "seconds"; "cost_usd" of other models' calls,
            judges' included, where a price is known (`agl.trainer.report.prices`).
        agents: name -> "calls", "tokens", and "reward" if the agent earned one itself.
        transcript: its calls, tools and rewards as text; cut after `TRANSCRIPT` characters.
    """

    rollout_id: str
    task: int
    reward: float | None
    success: bool | None
    error: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    agents: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    transcript: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyReport:
    """What was measured of one policy.

    Attributes:
        name: as `policies=` has it.
        run_id: of the run in the store.
        ran: what ran: "model", "fingerprint", ...
        rollouts: by task.
        tasks: how many.
        samples: per task; the smallest number.
        success: the tasks' mean success rate over the rollouts that ended.
        success_bounds: the same if all rollouts
            that failed had been failures, and if all had been successes.
        reward: mean total reward.
        rewards: each by name; 0 where a rollout did not earn it.
        pass_at, pass_hat: k -> bounds of pass@k and pass^k, equal where no rollout failed.
        failures: cause -> rollouts, the most frequent first.
        means: per rollout that ended: "calls", "tokens", "tools", "seconds", and "cost_usd" if any of them has it.
        agents: name -> the means of its "calls", "tokens" and "reward" per rollout.
    """

    name: str
    run_id: str
    ran: Mapping[str, Any]
    rollouts: Sequence[EvaluatedRollout]
    tasks: int
    samples: int
    success: Estimate
    success_bounds: tuple[float, float]
    reward: Estimate
    rewards: Mapping[str, Estimate]
    pass_at: Mapping[int, tuple[float, float]]
    pass_hat: Mapping[int, tuple[float, float]]
    failures: Mapping[str, int]
    means: Mapping[str, float]
    agents: Mapping[str, Mapping[str, float]]

    @property
    def failed(self) -> int:
        """Rollouts that failed."""
        return sum(self.failures.values())

    def by_task(self) -> dict[int, list[EvaluatedRollout]]:
        """Task -> its rollouts."""
        return _by_task(self.rollouts)


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """The rollouts of one policy in a store.

    Attributes:
        run_id, step, mode: select them.
        ran: what is known of what ran.
    """

    run_id: str
    step: int = 0
    mode: Mode = "val"
    ran: Mapping[str, Any] = field(default_factory=dict)

    async def read(self, store: Store) -> list[RolloutSummary]:
        """Raises `DatasetError` if there is none."""
        found: list[RolloutSummary] = []
        while True:
            after = found[-1].rollout.rollout_id if found else None
            page = await store.query_step(self.run_id, self.step, mode=self.mode, after=after, limit=_PAGE)
            found += page
            if len(page) < _PAGE:
                break
        found = [s for s in found if s.rollout.status != "cancelled"]
        if not found:
            raise DatasetError(
                f"there is no {self.mode} rollout of step {self.step}",
                hint="name a step after which there was a validation",
                run=self.run_id,
            )
        # A resumed run leaves what it has cancelled, and runs again what had failed. The store gives the rollouts of
        # one place in the order in which they were made, whatever the clock said.
        last = {(s.rollout.group, s.rollout.index): s for s in found}
        return sorted(last.values(), key=lambda s: (task_index(s), s.rollout.index))


async def evaluated_rollouts(
    store: Store, summaries: Sequence[RolloutSummary], is_success: IsSuccess
) -> list[EvaluatedRollout]:
    places = asyncio.Semaphore(_READERS)

    async def read(summary: RolloutSummary) -> EvaluatedRollout:
        async with places:
            rollout_id = summary.rollout.rollout_id
            attempt = summary.rollout.attempts
            spans = await store.query_spans(rollout_id, attempt)
            if summary.calls > sum(s.operation == semconv.CHAT for s in spans):
                spans = completed(spans, await store.query_calls(rollout_id, attempt))
            return _evaluated(summary, spans, is_success)

    return list(await asyncio.gather(*map(read, summaries)))


def _evaluated(summary: RolloutSummary, spans: Sequence[Span], is_success: IsSuccess) -> EvaluatedRollout:
    rollout = summary.rollout
    ended = rollout.status == "succeeded" and summary.reward is not None
    fault = Fault.of_spans(spans)
    by_name: dict[str, float] = defaultdict(float)
    agents: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0.0, "tokens": 0.0})
    for reward in summary.rewards:
        by_name[reward_label(reward)] += reward.value
        if reward.agent is not None:
            agents[reward.agent]["reward"] = agents[reward.agent].get("reward", 0.0) + reward.value
    for span in spans:
        if span.operation == semconv.CHAT:
            numbers = agents[span.agent or "?"]
            numbers["calls"] += 1
            numbers["tokens"] += totals([span])["output_tokens"] or 0
    of_attempt = totals(spans)
    cost = prices.total(span for span in spans if span.operation == semconv.CHAT)
    root = next((s for s in spans if s.parent_id is None), None)
    return EvaluatedRollout(
        rollout.rollout_id,
        task_index(summary),
        summary.reward if ended else None,
        fault is None and bool(is_success(summary)) if ended else None,
        None if ended else (summary.error or f"the rollout is {rollout.status}"),
        dict(by_name),
        {
            "calls": of_attempt["calls"],
            "tokens": of_attempt["output_tokens"] or 0,
            "tools": of_attempt["tools"],
            "seconds": root.seconds if root is not None else 0.0,
            **({} if cost is None else {"cost_usd": cost}),
        },
        dict(agents),
        _transcript(spans),
    )


def _transcript(spans: Sequence[Span]) -> str:
    shown = (
        semconv.CHAT,
        semconv.EXECUTE_TOOL,
        semconv.REWARD,
        semconv.HANDOFF,
        semconv.EXCEPTION,
        semconv.POLICY_FAULT,
    )
    text = "\n".join(line(s).plain for s in in_order(spans) if s.operation in shown)
    return text if len(text) <= TRANSCRIPT else f"{text[: TRANSCRIPT - 1]}…"


def policy_report(name: str, query: RolloutQuery, rollouts: Sequence[EvaluatedRollout]) -> PolicyReport:
    by_task = _by_task(rollouts)
    ended = {t: kept for t, rows in by_task.items() if (kept := [r for r in rows if r.error is None])}
    n, c, failed = (
        np.array([count(rows) for rows in by_task.values()])
        for count in (
            len,
            lambda rows: sum(r.success is True for r in rows),
            lambda rows: sum(r.error is not None for r in rows),
        )
    )
    samples = int(n.min())
    sampled = float(np.mean([len(rows) for rows in ended.values()])) if ended else 1.0
    rates = np.array([mean_of(r.success for r in rows) for rows in ended.values()], np.float64)
    everyone = [r for rows in ended.values() for r in rows]

    def over_tasks(value: Callable[[EvaluatedRollout], float]) -> Estimate:
        found = [[value(r) for r in rows] for rows in ended.values()]
        interval = statistics.reward_interval(found) if found else (np.nan, np.nan)
        return estimate(np.array([mean_of(values) for values in found], np.float64), interval)

    def bounds(estimate: Callable[..., Any], k: int) -> tuple[float, float]:
        return float(estimate(n, c, k).mean()), float(estimate(n, c + failed, k).mean())

    # An error's last line without the place where it happened, which differs between rollouts.
    lines = (_WHERE.sub("", error_line(r.error)) for r in rollouts if r.error is not None)
    causes = Counter(text.removeprefix("agl.errors.") for text in lines)
    ks = [k for k in (2**i for i in range(64)) if k <= samples] if samples else []
    names = sorted({label for r in everyone for label in r.rewards})
    agents = sorted({agent for r in everyone for agent in r.agents})
    measured = ["calls", "tokens", "tools", "seconds"]
    measured += ["cost_usd"] if any("cost_usd" in r.numbers for r in everyone) else []
    return PolicyReport(
        name,
        query.run_id,
        query.ran,
        rollouts,
        len(by_task),
        samples,
        estimate(rates, statistics.success_interval(rates, sampled) if rates.size else (np.nan, np.nan)),
        (float((c / n).mean()), float(((c + failed) / n).mean())),
        over_tasks(lambda r: r.reward or 0.0),
        {label: over_tasks(lambda r, label=label: r.rewards.get(label, 0.0)) for label in names},
        {k: bounds(statistics.pass_at_k, k) for k in ks},
        {k: bounds(statistics.pass_hat_k, k) for k in ks},
        dict(causes.most_common()),
        {name: mean_of(r.numbers.get(name, 0.0) for r in everyone) or 0.0 for name in measured},
        {
            agent: {
                key: mean_of(r.agents.get(agent, {}).get(key, 0.0) for r in everyone) or 0.0
                for key in sorted({key for r in everyone for key in r.agents.get(agent, ())})
            }
            for agent in agents
        },
    )


def task_index(summary: RolloutSummary) -> int:
    return int(summary.rollout.metadata.get("task_index", summary.rollout.index))


def _by_task(rollouts: Iterable[EvaluatedRollout]) -> dict[int, list[EvaluatedRollout]]:
    by_task: dict[int, list[EvaluatedRollout]] = defaultdict(list)
    for rollout in rollouts:
        by_task[rollout.task].append(rollout)
    return dict(sorted(by_task.items()))


def mean_of(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def estimate(values: np.ndarray, interval: tuple[Any, Any]) -> Estimate:
    mean = float(values.mean()) if values.size else math.nan
    return Estimate(mean, float(interval[0]), float(interval[1]))
