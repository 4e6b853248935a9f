"""The store: runs, rollouts, attempts, calls, spans, resources, policy versions, training; one async interface."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agl.mdp.spans import Span
from agl.mdp.types import Call, Reward

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
        max_attempts: total number of attempts, >= 1. retry_on: statuses of an attempt after which another one follows.
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
        task: any JSON value. mode: train, val, dev or collect. run_id: the training run; step: its step.
        group: rollouts of one group are compared. index: position within the step, which determines the seed.
        seed: seed of the rollout's sampling. resources_id: version of the resources it uses; None = the latest.
        priority: higher ones are leased first. rollout_id: chosen by the caller to make enqueueing idempotent;
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
        call_id, rollout_id: identify the call. step: the training step. policy_version: produced by its update.
        sequence: number of the merged row within the step. reward, return_, advantage: float64.
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
        run_id: its id, which its rollouts and metrics carry. name: what its user calls it; "" if nothing.
        algorithm: the name of the algorithm's class ("GRPO", "VERL", "Baseline").
        status: how far it is. error: why it failed.
        config: its settings, as JSON values. directory: where it was run; on the machine that ran it.
        step: completed steps. steps: those planned; None if that is not known.
        created_at: when it began. updated_at: the last write of the run, its metrics included; set by the store.
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
        rollout: as stored. error: why its last attempt failed.
        rewards: those of its last attempt, AIR's included, in the order in which they were earned.
        agents: who made its calls, in the order of their first ones. The numbers are of its last attempt:
        calls, failed_calls: LLM calls, and those of them that failed. forks: conversations that were not continued.
        tokens: sampled ones. trained_tokens: those of them that were trained.
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
        namespace, key: identify it in its scope. value: a JSON value. text: what a search reads; "" is never found.
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


class Store(Protocol):
    """A store. Every method can be called from any task of any event loop.

    Once a method has returned, its effect survives a kill of any process. Tasks, metadata, resources, attributes and
    messages are JSON values, so tuples in them come back as lists. Errors are `agl.errors.StoreError`: an unknown id,
    a transition that `ATTEMPT_TRANSITIONS` forbids, a full disk.
    """

    # -- rollouts and attempts ------------------------------------------------------------------------------------
    async def enqueue_rollouts(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        """Add rollouts with status "queuing", all or none. One whose `rollout_id` exists is returned unchanged."""
        ...

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        *,
        run_id: str | None = None,
        wait: float = 0.0,
        request_id: str | None = None,
    ) -> AttemptedRollout | None:
        """Lease the next queued rollout (highest priority, then oldest) and open its next attempt, or None.

        Rollout and attempt become "preparing". Two callers never get the same rollout. A caller that repeats a request
        with the same `request_id` gets the lease that it missed, as long as the attempt is "preparing"; with a new
        secret, and the one before is no longer valid.

        Args:
            run_id: only rollouts of this training run; `NO_RUN` for those of none.
            wait: seconds to wait for a rollout. One that is queued in this process or announced by the database is
                leased at once, others within a second or two.
        """
        ...

    async def is_leased_with(self, rollout_id: str, attempt: int, secrets: Sequence[str]) -> bool:
        """Whether the attempt was leased with one of these secrets; also after it has ended. False if there is no such
        attempt."""
        ...

    async def give_back(self, request_id: str) -> None:
        """Undo the lease of a request whose caller has gone. No effect without one, or if its attempt has moved on."""
        ...

    async def update_attempt(
        self, rollout_id: str, attempt: int, status: AttemptStatus, *, error: str | None = None
    ) -> Rollout:
        """Set the status of an attempt, and of its rollout accordingly.

        A terminal or unresponsive attempt ends the rollout ("succeeded" or "failed"), or queues it again when
        `config.retry_on` names the status and attempts remain. "running" also counts as a heartbeat. A terminal
        rollout stays unchanged, and an attempt that a later one has replaced no longer affects its rollout. An
        unresponsive attempt that comes back before its rollout is leased again takes it out of the queue.
        """
        ...

    async def heartbeat(self, rollout_id: str, attempt: int) -> None:
        """Report that an attempt is alive."""
        ...

    async def expire_attempts(self, now: float | None = None) -> list[Attempt]:
        """End attempts past `timeout_seconds` ("timeout") or `unresponsive_seconds` ("unresponsive"); requeue or
        fail their rollouts as in `update_attempt`. Returns the attempts that were ended. Call it about once a second.

        Times are those for which this store itself has seen an attempt run or be silent. So neither setting a clock nor
        a downtime of the store expires anything. With `now` (seconds since the epoch) the stored times are compared
        with that instead.
        """
        ...

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, request_id: str | None = None
    ) -> AttemptedRollout:
        """Open a rollout's next attempt for a caller that runs it itself, whatever the rollout's status.

        Rollout and attempt become "preparing"; `config.max_attempts` is no bound here. A repetition with the same
        `request_id` opens no other attempt.
        """
        ...

    async def update_rollout(self, rollout_id: str, values: Mapping[str, Any]) -> Rollout:
        """Set fields of a rollout: "task", "mode", "resources_id", "config", "metadata" or "status".

        Its attempts keep their statuses; open ones get the time limits of a new `config`. "queuing" queues the rollout
        again. StoreError for another field, or a value that the field cannot have.
        """
        ...

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """End rollouts that are not yet terminal with status "cancelled". Their open attempts become "failed"."""
        ...

    async def get_rollout(self, rollout_id: str) -> Rollout:
        """One rollout, by its id or a unique prefix of it. StoreError if there is none, or several."""
        ...

    async def query_rollouts(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
        status: Sequence[RolloutStatus] | None = None,
        since: float | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        """Rollouts that match all filters, oldest first.

        Args:
            since: enqueued at that time or later; seconds since the epoch.
            after: only rollouts after the one with this id, for paging.
            limit: maximum number of rollouts.
        """
        ...

    async def count_rollouts(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
        status: Sequence[RolloutStatus] | None = None,
        since: float | None = None,
    ) -> int:
        """The number of rollouts that match all filters."""
        ...

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """A rollout's attempts in order."""
        ...

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """The terminal ones of these rollouts, as soon as all are terminal or `timeout` seconds have passed."""
        ...

    # -- calls and spans ------------------------------------------------------------------------------------------
    async def add_calls(self, calls: Sequence[Call]) -> None:
        """Record LLM calls. A call whose id is stored already stays unchanged. Of a prompt that extends the parent
        call only the suffix is stored."""
        ...

    async def query_calls(self, rollout_id: str, attempt: int | None = None) -> list[Call]:
        """A rollout's calls by attempt and index, with complete prompts. `attempt` None = all attempts."""
        ...

    async def add_spans(self, spans: Sequence[Span]) -> None:
        """Record spans. A span that is stored already (same trace and span id) stays unchanged."""
        ...

    async def query_spans(self, rollout_id: str, attempt: int | None = None) -> list[Span]:
        """A rollout's spans by start time."""
        ...

    # -- resources, policies, training ----------------------------------------------------------------------------
    async def update_resources(self, resources: Mapping[str, Any], *, resources_id: str | None = None) -> str:
        """Store a new version of the named resources (JSON values) and return its id.

        `resources_id` is chosen by the caller to make it idempotent; None = a new one.
        """
        ...

    async def get_resources(self, resources_id: str | None = None) -> tuple[str, Mapping[str, Any]] | None:
        """(id, resources) of that version, or of the latest one. None without any."""
        ...

    async def query_resources(self, prefix: str = "") -> list[tuple[str, Mapping[str, Any]]]:
        """(id, resources) of the versions whose ids begin with `prefix`, oldest first."""
        ...

    async def put_note(self, key: str, value: Any) -> None:
        """Keep a JSON value under a key, in place of the one before: what programs record next to their rollouts."""
        ...

    async def query_notes(self, prefix: str = "") -> dict[str, Any]:
        """The notes whose keys begin with `prefix`."""
        ...

    # -- memories -------------------------------------------------------------------------------------------------
    async def merge_memories(
        self, scope: str, version: int, entries: Sequence[MemoryEntry] = (), removed: Sequence[MemoryId] = ()
    ) -> None:
        """Make a new version of a scope: these entries are added, or replace those with their namespace and key, and
        the removed ones are seen no more. Earlier versions stay as they are; a repetition has no effect.

        Args:
            scope: a run's id, or a memory's name. version: not less than any before.
        """
        ...

    async def query_memories(self, scope: str, version: int | None = None) -> list[MemoryEntry]:
        """The entries that a version of a scope holds, None = the newest; in order of writing."""
        ...

    async def rank_memories(self, scope: str, query: str, version: int | None = None) -> list[tuple[MemoryId, float]]:
        """The entries of a version whose texts have a word of the query, best first, with their relevance > 0.

        A word with punctuation in it ("C-417") is a phrase. SQLite: BM25 of FTS5 over the entries of this version
        alone, so that nothing written elsewhere or later changes a rank. PostgreSQL: `ts_rank_cd`.
        """
        ...

    async def revert_memories(self, scope: str, version: int) -> None:
        """Forget what was written to a scope after this version."""
        ...

    async def add_policy_version(
        self, run_id: str, policy: str, version: int, step: int, checkpoint: str | None = None
    ) -> None:
        """Record a version of a policy; a repetition updates `checkpoint`."""
        ...

    async def add_trained_calls(self, run_id: str, rows: Sequence[TrainedCall]) -> None:
        """Record what a training step did with each call. A row with the same call and step is replaced."""
        ...

    async def query_trained_calls(self, rollout_id: str) -> list[TrainedCall]:
        """The training records of a rollout's calls."""
        ...

    # -- runs -----------------------------------------------------------------------------------------------------
    async def put_run(self, run: TrainingRun) -> None:
        """Record a run, or replace what is recorded of it. `created_at` of the first record stays; 0 stands for now."""
        ...

    async def query_runs(
        self, *, run_ids: Sequence[str] | None = None, after: str | None = None, limit: int = 100
    ) -> list[TrainingRun]:
        """Runs, newest first.

        Args:
            run_ids: these alone, where they exist. after: only runs older than the one with this id, for paging.
            limit: maximum number of runs.
        """
        ...

    async def add_metrics(self, run_id: str, step: int, values: Mapping[str, float | None]) -> None:
        """Record numbers of a step by name. A number that is recorded already is replaced; None and those that are not
        finite are recorded as None. StoreError if the store does not know the run: `put_run` comes first."""
        ...

    async def delete_metrics(self, run_id: str, after_step: int) -> None:
        """Delete the numbers of later steps, which a run that resumes from `after_step` will record again."""
        ...

    async def query_metrics(
        self,
        run_ids: Sequence[str],
        *,
        names: Sequence[str] | None = None,
        after_step: int | None = None,
        ends: bool = False,
        limit: int = 100_000,
    ) -> list[Metric]:
        """Numbers of runs, by step, then name.

        Args:
            names: these alone. after_step: of later steps alone.
            ends: of each run and name only the first and the last one.
            limit: maximum number of values.
        """
        ...

    async def query_step(
        self,
        run_id: str,
        step: int,
        *,
        mode: Mode = "train",
        group: str | None = None,
        after: str | None = None,
        limit: int = 256,
    ) -> list[RolloutSummary]:
        """One step's rollouts, in the order of their groups and places, in a bounded number of database queries.

        Args:
            step: as in `Rollout`: training counts from 0, and a validation has the number of steps that are done.
            group: of this group alone. after: only rollouts after the one with this id, for paging.
            limit: maximum number of rollouts.
        """
        ...

    async def query_open_attempts(self, *, limit: int = 1000) -> list[Attempt]:
        """The attempts that are "preparing" or "running", longest-running first: what every runner is doing."""
        ...

    # -- the store itself -----------------------------------------------------------------------------------------
    async def statistics(self) -> dict[str, int]:
        """The numbers of "rollouts", "attempts", "calls", "spans" and "resources", and of rollouts by status."""
        ...

    async def prune(self, before: float, *, run_ids: Sequence[str] | None = None) -> Pruned:
        """Delete the attempts, calls and spans of rollouts that ended before that time (seconds since the epoch).

        The rollouts themselves, training records (`TrainedCall`, with every call's reward), resources, policy versions,
        runs and their metrics stay. Rewards of untrained calls are deleted with their spans. `run_ids` restricts it to
        these training runs. Reading and writing continue in the meantime. Depending on the database, the space is
        returned to the disk or reused for new rows.
        """
        ...

    async def close(self) -> None:
        """Finish pending operations and release the database. Idempotent."""
        ...
