"""The data of a store: rollouts and their attempts, training records, runs, metrics and memories."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agl.mdp.types import Reward

RolloutStatus = Literal["queuing", "preparing", "running", "succeeded", "failed", "cancelled"]
AttemptStatus = Literal["preparing", "running", "succeeded", "failed", "timeout", "unresponsive"]
Mode = Literal["train", "val", "dev", "collect"]
"""The purpose of a rollout: training, validation, a dry run, or recording a program that uses its own models."""
RunStatus = Literal["running", "succeeded", "failed", "stopped"]
"""The status of a run. A process that was killed leaves "running"; `TrainingRun.updated_at` shows how long ago."""

ATTEMPT_TRANSITIONS: Mapping[str, frozenset[str]] = {
    "preparing": frozenset({"running", "succeeded", "failed", "timeout", "unresponsive"}),
    "running": frozenset({"succeeded", "failed", "timeout", "unresponsive"}),
    "unresponsive": frozenset({"running", "succeeded", "failed", "timeout"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
}
"""The statuses that can follow each status of an attempt. Setting the present one again is allowed, without effect."""
NOT_AGAIN = "  -> not tried again: "
"""Begins the line of an attempt's error that says why the rollout gets no other attempt, though it could have one."""


def new_rollout_id() -> str:
    """A unique id: "ro-", the time in units of 64 s as 4 hex digits, 12 random hex digits.

    Rows written at the same time are neighbours in every index, so they share pages. With purely random ids each row
    would dirty another page, and more pages as the store grows. The time wraps around every 48 days, which is
    harmless. The time part is short, so that the first digits of an id suffice to name a rollout.
    """
    return f"ro-{int(time.time()) >> 6 & 0xFFFF:04x}{secrets.token_hex(6)}"


NO_RUN = ""
"""Stands for a run's id in queries: selects the rollouts that belong to no run."""

ROLLOUT_TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
ATTEMPT_TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "timeout"})


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How a rollout is run.

    Attributes:
        max_attempts: total number of attempts, >= 1.
        retry_on: statuses of an attempt after which another one follows.
        timeout_seconds: an attempt's limit; None for none.
        unresponsive_seconds: an attempt without a heartbeat for this long is abandoned; None for never.
    """

    max_attempts: int = 2
    retry_on: tuple[str, ...] = ("failed", "timeout", "unresponsive")
    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class NewRollout:
    """A rollout to enqueue.

    Attributes:
        task: any JSON value.
        mode: train, val, dev or collect.
        run_id: the training run; step: its step.
        group: rollouts of one group are compared.
        index: position within the step, which determines the seed.
        seed: seed of the rollout's sampling.
        resources_id: version of the resources it uses; None = the latest.
        priority: higher ones are leased first.
        rollout_id: chosen by the caller to make enqueueing idempotent;
            None = a new one. created_at: when it began, of one that runs already; None = now. Seconds since the epoch.
    """

    task: Any
    mode: Mode = "train"
    run_id: str | None = None
    step: int | None = None
    group: str = ""
    index: int = 0
    seed: int = 0
    resources_id: str | None = None
    priority: int = 0
    config: RolloutConfig = field(default_factory=RolloutConfig)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rollout_id: str | None = None
    created_at: float | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a rollout. `attempt` counts from 1.

    `error` is the traceback or reason of a failure; times are seconds since the epoch.
    """

    rollout_id: str
    attempt: int
    status: AttemptStatus
    worker_id: str | None = None
    error: str | None = None
    started_at: float = 0.0
    last_heartbeat_at: float = 0.0
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout as stored; fields as in `NewRollout`."""

    rollout_id: str
    task: Any
    status: RolloutStatus
    mode: Mode
    run_id: str | None
    step: int | None
    group: str
    index: int
    seed: int
    resources_id: str | None
    priority: int
    config: RolloutConfig
    metadata: Mapping[str, Any]
    attempts: int
    created_at: float
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class AttemptedRollout:
    """A rollout with the attempt that is to run it now.

    `secret` proves that its holder has leased the attempt. Only `Store.dequeue_rollout` returns it; the store keeps its
    hash.
    """

    rollout: Rollout
    attempt: Attempt
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """What training did with one call.

    Attributes:
        call_id, rollout_id: identify the call.
        step: the training step.
        policy_version: produced by its update.
        sequence: number of the merged row within the step.
        reward, return_, advantage: float64.
        tokens: number of its trained tokens; 0 when it was dropped.
        dropped: the reason why it was not trained, if so.
    """

    call_id: str
    rollout_id: str
    step: int
    policy_version: int
    sequence: int | None
    reward: float
    return_: float
    advantage: float
    tokens: int
    dropped: str | None = None


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A training, an evaluation or a dry run, as `Store.put_run` records it.

    Attributes:
        run_id: its id, which its rollouts and metrics carry.
        name: what its user calls it; "" if nothing.
        algorithm: the name of the algorithm's class ("GRPO", "VERL", "Baseline").
        status: how far it is.
        error: why it failed.
        config: its settings, as JSON values.
        directory: where it was run; on the machine that ran it.
        step: completed steps.
        steps: those planned; None if that is not known.
        created_at: when it began.
        updated_at: the last write of the run, its metrics included; set by the store.
        ended_at: when it ended, if so. Times are seconds since the epoch.
    """

    run_id: str
    name: str = ""
    algorithm: str = ""
    status: RunStatus = "running"
    error: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    directory: str | None = None
    step: int = 0
    steps: int | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a run's history. `step` counts completed steps; `value` is None where it was not finite."""

    run_id: str
    step: int
    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A rollout as a row of a table: what `Store.query_step` knows of it without its texts and tokens.

    Attributes:
        rollout: as stored.
        error: why its last attempt failed.
        rewards: those of its last attempt, AIR's included, in the order in which they were earned.
        agents: who made its calls, in the order of their first ones. The numbers are of its last attempt:
        calls, failed_calls: LLM calls, and those of them that failed.
        forks: conversations that were not continued.
        tokens: sampled ones.
        trained_tokens: those of them that were trained.
        zero_advantage_tokens: those of these
            whose advantage is 0.
        advantage: the mean of its trained calls' advantages, weighted by their tokens; None if none was trained.
        dropped: a reason why a call was not trained.
    """

    rollout: Rollout
    error: str | None = None
    rewards: Sequence[Reward] = ()
    agents: Sequence[str] = ()
    calls: int = 0
    failed_calls: int = 0
    forks: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    zero_advantage_tokens: int = 0
    advantage: float | None = None
    dropped: str | None = None

    @property
    def reward(self) -> float | None:
        """Sum of the primary rewards; None without any."""
        primary = [reward.value for reward in self.rewards if reward.primary]
        return math.fsum(primary) if primary else None


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """One entry of a memory (`agl.Memory`).

    Attributes:
        namespace, key: identify it in its scope.
        value: a JSON value.
        text: what a search reads; "" is never found.
        reward: of the rollout that wrote it; None without one.
        source: identifies the task whose rollout wrote it; None for an entry that no rollout wrote.
        since: the version of the scope from which on it is seen.
        created_at, updated_at: seconds since the epoch.
        embedding: float [d] of `text`, where the memory has `embed=`.
    """

    namespace: tuple[str, ...]
    key: str
    value: Any
    text: str = ""
    reward: float | None = None
    source: str | None = None
    since: int = 0
    created_at: float = 0.0
    updated_at: float = 0.0
    embedding: Sequence[float] | None = None

    @property
    def id(self) -> MemoryId:
        """Namespace and key."""
        return self.namespace, self.key


MemoryId = tuple[tuple[str, ...], str]
"""Namespace and key of an entry."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `Store.prune` deleted: the numbers of `attempts`, `calls` and `spans`, and of `rollouts` that had any."""

    rollouts: int = 0
    attempts: int = 0
    calls: int = 0
    spans: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(
            self.rollouts + other.rollouts,
            self.attempts + other.attempts,
            self.calls + other.calls,
            self.spans + other.spans,
        )
