"""What was measured of policies on the same tasks: each one's numbers with their error, and how two of them differ.

Invariant: an `Evaluation` is a function of stored rollouts, whether `agl.evaluate` ran them or a training's validation.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agl import semconv
from agl._version import __version__
from agl.errors import ConfigError, DatasetError, nearest
from agl.mdp.faults import Fault
from agl.mdp.spans import Span
from agl.texts import printable
from agl.tracing.inferred import completed, totals
from agl.trainer.report import statistics
from agl.trainer.report.trace_tree import error_line, line
from agl.trainer.run.results import reward_label
from agl.trainer.run.trainer import Result
from agl.trainer.store.base import Mode, RolloutSummary, Store
from agl.trainer.store.location import read_store

Success = float | Callable[[RolloutSummary], bool]
"""The total reward from which on a rollout is a success, or a function of the rollout."""

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
        rollout_id: in the evaluation's store. task: the task's index in the dataset.
        reward: its total reward; None if it failed. success: whether that is a success; None if it failed.
        error: why it failed. rewards: by name, an agent's own under the agent's name.
        numbers: "calls" (of any model), "tokens" (sampled), "tools", "seconds".
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
        name: as `policies=` has it. run_id: of the run in the store. ran: what ran: "model", "fingerprint", ...
        rollouts: by task. tasks: how many. samples: per task; the smallest number.
        success: the tasks' mean success rate over the rollouts that ended. success_bounds: the same if all rollouts
            that failed had been failures, and if all had been successes.
        reward: mean total reward. rewards: each by name; 0 where a rollout did not earn it.
        pass_at, pass_hat: k -> bounds of pass@k and pass^k, equal where no rollout failed.
        failures: cause -> rollouts, the most frequent first.
        means: per rollout that ended: "calls", "tokens", "tools", "seconds".
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
class Flip:
    """A task that more than half of the rollouts solve under one policy, and at most half under the other.

    Attributes:
        task: its index. before, after: success rates. rollouts: the ids of a rollout of either policy that shows it.
    """

    task: int
    before: float
    after: float
    rollouts: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How `after` differs from `before`, task by task.

    Attributes:
        before, after: the policies' names. tasks: those in which rollouts of both ended.
        success, reward: after - before, with intervals. success_p, reward_p: of `statistics.sign_flip_test`.
        smallest_difference: in success; a smaller one would mostly not have been seen (alpha 0.05, power 0.8).
        gained, lost: the tasks that flipped.
    """

    before: str
    after: str
    tasks: int
    success: Estimate
    success_p: float
    reward: Estimate
    reward_p: float
    smallest_difference: float
    gained: Sequence[Flip]
    lost: Sequence[Flip]

    @property
    def significant(self) -> bool:
        """Whether the difference in success is larger than chance explains, at 5 %."""
        return self.success_p < 1 - statistics.CONFIDENCE


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Policies on the same tasks.

    Attributes:
        tasks: index in the dataset -> the task. policies: by name, in order. success: what counts as one.
        store: the URL of the store with the rollouts, for `agl explain`.
    """

    tasks: Mapping[int, Any]
    policies: Mapping[str, PolicyReport]
    success: str
    store: str

    @classmethod
    async def of_runs(
        cls, store: Store, url: str, queries: Mapping[str, RolloutQuery], *, success: Success = 1.0
    ) -> Evaluation:
        """Read from a store.

        Args:
            url: of the store. queries: name -> which rollouts.

        Raises:
            DatasetError: one of them has no rollout.
        """
        tasks: dict[int, Any] = {}
        policies = {}
        for name, query in queries.items():
            summaries = await query.read(store)
            for summary in summaries:
                tasks.setdefault(_task_index(summary), summary.rollout.task)
            policies[name] = _report(name, query, await _rollouts(store, summaries, success))
        what = f"total reward >= {success:g}" if isinstance(success, int | float) else _name(success)
        return cls(dict(sorted(tasks.items())), policies, what, url)

    @classmethod
    async def of_run(
        cls, store: Store, url: str, run_id: str, *, steps: Sequence[int], success: Success = 1.0
    ) -> Evaluation:
        """The validations of a training run after these numbers of steps, as policies "step 0", "step 50", ..."""
        queries = {f"step {step}": RolloutQuery(run_id, step) for step in steps}
        return await cls.of_runs(store, url, queries, success=success)

    @classmethod
    def of_result(cls, result: Result, *, success: Success = 1.0) -> Evaluation:
        """A training's first and last validation, from its store; nothing is run again. Outside an event loop.

        Raises:
            DatasetError: there was no validation.
            StoreError: the store cannot be opened by its URL.
        """
        steps = [h["step"] for h in result.history if "val/reward" in h]
        if not steps:
            raise DatasetError("the run has no validation", hint="give fit a val_dataset", run=result.run_id)
        ends = list(dict.fromkeys((steps[0], steps[-1])))
        return read_store(
            result.store, lambda store: cls.of_run(store, result.store, result.run_id, steps=ends, success=success)
        )

    def compare(self, before: str, after: str) -> Comparison:
        """The paired comparison of two policies.

        Raises:
            ConfigError: a name that is none of the policies'.
        """
        first, second = self._policy(before), self._policy(after)
        rows_1, rows_2 = first.by_task(), second.by_task()
        pairs = {t: (_mean(r.success for r in rows_1[t]), _mean(r.success for r in rows_2.get(t, ()))) for t in rows_1}
        rates = {t: (a, b) for t, (a, b) in pairs.items() if a is not None and b is not None}
        if not rates:
            raise DatasetError(f"no task has rollouts of both {before!r} and {after!r} that ended")
        success = np.array([b - a for a, b in rates.values()])
        reward = np.array([_reward(rows_2[t]) - _reward(rows_1[t]) for t in rates])
        unit = 1 / min(first.samples, second.samples)

        def flips(gained: bool) -> list[Flip]:
            return [
                Flip(t, a, b, (_showing(rows_1[t], not gained), _showing(rows_2[t], gained)))
                for t, (a, b) in rates.items()
                if (a > 0.5, b > 0.5) == (not gained, gained)
            ]

        return Comparison(
            before,
            after,
            len(rates),
            _estimate(success, statistics.mean_interval(success, unit)),
            statistics.sign_flip_test(success),
            _estimate(reward, statistics.mean_interval(reward)),
            statistics.sign_flip_test(reward),
            statistics.smallest_difference(success, unit),
            flips(gained=True),
            flips(gained=False),
        )

    def comparisons(self) -> list[Comparison]:
        """The first policy with each other one."""
        first, *others = self.policies
        return [self.compare(first, other) for other in others]

    def _policy(self, name: str) -> PolicyReport:
        if name not in self.policies:
            raise ConfigError(f"no policy {name!r} was evaluated", hint=nearest(name, self.policies))
        return self.policies[name]

    def rollout(self, rollout_id: str) -> EvaluatedRollout:
        """One of the rollouts, by its whole id."""
        return next(r for p in self.policies.values() for r in p.rollouts if r.rollout_id == rollout_id)

    def to_json(self, *, rollouts: bool = True) -> dict[str, Any]:
        """Everything except transcripts as JSON values; non-finite numbers are null.

        Args:
            rollouts: False leaves tasks and rollouts out, too.
        """
        policies = {}
        for name, policy in self.policies.items():
            rows = [{k: v for k, v in asdict(r).items() if k != "transcript"} for r in policy.rollouts]
            policies[name] = asdict(policy) | {"rollouts": rows if rollouts else []}
        return _json(
            {
                "agl": __version__,
                "store": self.store,
                "success": self.success,
                "tasks": self.tasks if rollouts else {},
                "policies": policies,
                "comparisons": [asdict(c) | {"significant": c.significant} for c in self.comparisons()],
            }
        )

    def table(self) -> None:
        """Print the numbers of all policies, and the first one's comparison with the others."""
        self._view("print_table")

    def save(self, path: str | Path) -> Path:
        """Write a report: `.html` (one file that loads nothing), `.json` or `.md`, by the name's ending.

        Raises:
            ConfigError: another ending.
        """
        path = Path(path)
        write: dict[str, Callable[[], str]] = {
            ".html": lambda: self._view("page"),
            ".json": lambda: json.dumps(self.to_json(), indent=2) + "\n",
            ".md": lambda: self._view("markdown"),
        }
        if path.suffix not in write:
            raise ConfigError(f"a report cannot be written as {path.name!r}", hint="end it with .html, .json or .md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write[path.suffix](), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        return self._view("fragment")

    def _view(self, name: str) -> Any:
        from agl.trainer.evaluation import views

        return getattr(views, name)(self)


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """The rollouts of one policy in a store.

    Attributes:
        run_id, step, mode: select them. ran: what is known of what ran.
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
        # A resumed run leaves what it has cancelled, and runs again what had failed.
        last = {(s.rollout.group, s.rollout.index): s for s in sorted(found, key=lambda s: s.rollout.created_at)}
        return sorted(last.values(), key=lambda s: (_task_index(s), s.rollout.index))


# -- from stored rollouts to numbers ------------------------------------------------------------------------------


async def _rollouts(store: Store, summaries: Sequence[RolloutSummary], success: Success) -> list[EvaluatedRollout]:
    places = asyncio.Semaphore(_READERS)

    async def read(summary: RolloutSummary) -> EvaluatedRollout:
        async with places:
            rollout_id, attempt = summary.rollout.rollout_id, summary.rollout.attempts
            spans = await store.query_spans(rollout_id, attempt)
            if summary.calls > sum(s.operation == semconv.CHAT for s in spans):
                spans = completed(spans, await store.query_calls(rollout_id, attempt))
            return _evaluated(summary, spans, success)

    return list(await asyncio.gather(*map(read, summaries)))


def _evaluated(summary: RolloutSummary, spans: Sequence[Span], success: Success) -> EvaluatedRollout:
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
    root = next((s for s in spans if s.parent_id is None), None)
    return EvaluatedRollout(
        rollout.rollout_id,
        _task_index(summary),
        summary.reward if ended else None,
        fault is None and _is_success(summary, success) if ended else None,
        None if ended else (summary.error or f"the rollout is {rollout.status}"),
        dict(by_name),
        {
            "calls": of_attempt["calls"],
            "tokens": of_attempt["output_tokens"] or 0,
            "tools": of_attempt["tools"],
            "seconds": root.end - root.start if root is not None else 0.0,
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
    text = "\n".join(line(s).plain for s in sorted(spans, key=lambda s: (s.start, s.end)) if s.operation in shown)
    return text if len(text) <= TRANSCRIPT else f"{text[: TRANSCRIPT - 1]}…"


def _report(name: str, query: RolloutQuery, rollouts: Sequence[EvaluatedRollout]) -> PolicyReport:
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
    rates = np.array([_mean(r.success for r in rows) for rows in ended.values()], np.float64)
    everyone = [r for rows in ended.values() for r in rows]

    def over_tasks(value: Callable[[EvaluatedRollout], float]) -> Estimate:
        values = np.array([_mean(map(value, rows)) for rows in ended.values()], np.float64)
        return _estimate(values, statistics.mean_interval(values) if values.size else (np.nan, np.nan))

    def bounds(estimate: Callable[..., Any], k: int) -> tuple[float, float]:
        return float(estimate(n, c, k).mean()), float(estimate(n, c + failed, k).mean())

    ks = [k for k in (2**i for i in range(64)) if k <= samples] if samples else []
    names = sorted({label for r in everyone for label in r.rewards})
    agents = sorted({agent for r in everyone for agent in r.agents})
    return PolicyReport(
        name,
        query.run_id,
        query.ran,
        rollouts,
        len(by_task),
        samples,
        _estimate(rates, statistics.success_interval(rates, sampled) if rates.size else (np.nan, np.nan)),
        (float((c / n).mean()), float(((c + failed) / n).mean())),
        over_tasks(lambda r: r.reward or 0.0),
        {label: over_tasks(lambda r, label=label: r.rewards.get(label, 0.0)) for label in names},
        {k: bounds(statistics.pass_at_k, k) for k in ks},
        {k: bounds(statistics.pass_hat_k, k) for k in ks},
        dict(Counter(_cause(r.error) for r in rollouts if r.error is not None).most_common()),
        {name: _mean(r.numbers[name] for r in everyone) or 0.0 for name in ("calls", "tokens", "tools", "seconds")},
        {
            agent: {
                key: _mean(r.agents.get(agent, {}).get(key, 0.0) for r in everyone) or 0.0
                for key in sorted({key for r in everyone for key in r.agents.get(agent, ())})
            }
            for agent in agents
        },
    )


def _cause(error: str) -> str:
    """An error's last line without the place where it happened, which is another one in each rollout."""
    return _WHERE.sub("", error_line(error)).removeprefix("agl.errors.")


def _is_success(summary: RolloutSummary, success: Success) -> bool:
    if not isinstance(success, int | float):
        return bool(success(summary))
    # Sums of rewards such as 0.1 + 0.2 + 0.7 are not exact.
    return summary.reward is not None and summary.reward >= success - 1e-9


def _task_index(summary: RolloutSummary) -> int:
    return int(summary.rollout.metadata.get("task_index", summary.rollout.index))


def _by_task(rollouts: Iterable[EvaluatedRollout]) -> dict[int, list[EvaluatedRollout]]:
    by_task: dict[int, list[EvaluatedRollout]] = defaultdict(list)
    for rollout in rollouts:
        by_task[rollout.task].append(rollout)
    return dict(sorted(by_task.items()))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def _reward(rollouts: Iterable[EvaluatedRollout]) -> float:
    return _mean(r.reward for r in rollouts) or 0.0


def _showing(rollouts: Sequence[EvaluatedRollout], success: bool) -> str:
    """The id of a rollout that succeeds, or does not."""
    return next((r.rollout_id for r in rollouts if r.success is success), rollouts[0].rollout_id)


def _estimate(values: np.ndarray, interval: tuple[Any, Any]) -> Estimate:
    mean = float(values.mean()) if values.size else math.nan
    return Estimate(mean, float(interval[0]), float(interval[1]))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _json(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _json(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_json(inner) for inner in value]
        case None | bool() | int() | str():
            return value
    return printable(str(value))
