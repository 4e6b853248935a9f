"""The store: rollouts, attempts, calls, spans, resources, policy versions, training, behind one async interface."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agl.mdp.spans import Span
from agl.mdp.types import Call

RolloutStatus = Literal["queuing", "preparing", "running", "succeeded", "failed", "cancelled"]
AttemptStatus = Literal["preparing", "running", "succeeded", "failed", "timeout", "unresponsive"]
Mode = Literal["train", "val", "dev", "collect"]
"""What a rollout is for: training, validation, a dry run, or the record of a program on its own models."""

ATTEMPT_TRANSITIONS: Mapping[str, frozenset[str]] = {
    "preparing": frozenset({"running", "succeeded", "failed", "timeout", "unresponsive"}),
    "running": frozenset({"succeeded", "failed", "timeout", "unresponsive"}),
    "unresponsive": frozenset({"running", "succeeded", "failed", "timeout"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
}
"""From which attempt status which others can follow. Setting the present status again is allowed and does nothing."""


def new_rollout_id() -> str:
    """An id that nobody else has: "ro-", the time in units of 64 s as 4 hex digits, 12 random ones.

    Rollouts of one time lie side by side in every index, so what is written together shares pages; with ids that were
    random alone, each row would dirty a page of its own, in more and more pages as the store grows. That the time
    begins anew every 48 days does no harm. It is short because a beginning of an id is to be enough to name a rollout.
    """
    return f"ro-{int(time.time()) >> 6 & 0xFFFF:04x}{secrets.token_hex(6)}"


NO_RUN = ""
"""In place of a run's id, where one is asked for: that of rollouts which belong to no run."""

ROLLOUT_TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
ATTEMPT_TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "timeout"})


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How a rollout is run.

    Attributes:
        max_attempts: attempts in all, >= 1. retry_on: attempt statuses that are tried again.
        timeout_seconds: an attempt's limit; None for none.
        unresponsive_seconds: an attempt without a heartbeat for this long is given up; None for never.
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
        group: rollouts of one group are compared. index: place within the step, which fixes the seed.
        seed: of the rollout's sampling. resources_id: version of the resources it uses; None = the latest.
        rollout_id: chosen by the caller to make enqueueing idempotent; None = a new one.
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
    """A rollout with the attempt that is to run it now."""

    rollout: Rollout
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """What training did with one call.

    Attributes:
        call_id, rollout_id, step: which call, when. policy_version: the version that the update produced.
        sequence: number of the merged row within the step. reward, return_, advantage: float64.
        tokens: how many of its tokens were trained; 0 when it was dropped.
        dropped: why it was not trained, if so.
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
class Pruned:
    """How much `Store.prune` deleted: of how many `rollouts` how many `attempts`, `calls` and `spans`."""

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
    """Every method is safe to call from any task of any event loop; what has returned survives a kill of any process.

    Tasks, metadata, resources, attributes and messages are JSON values, so tuples in them come back as lists.
    Errors are `agl.errors.StoreError`: an unknown id, a transition that `ATTEMPT_TRANSITIONS` forbids, a full disk.
    """

    # -- rollouts and attempts ------------------------------------------------------------------------------------
    async def enqueue_rollouts(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        """Add rollouts with status "queuing", all or none. A `rollout_id` that exists already is returned as it is."""
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

        `run_id` restricts it to one training run, `NO_RUN` to rollouts of none. The rollout becomes "preparing", so
        does the attempt. Two callers never get the same rollout. Where there is none, up to `wait` seconds pass until
        there is: work queued in this process or announced by the database is seen at once, other work within a second
        or two. A caller that repeats a request with the same `request_id` gets the lease that it missed, as long as
        the attempt is "preparing".
        """
        ...

    async def give_back(self, request_id: str) -> None:
        """Undo the lease of a request whose caller has gone; nothing if there is none, or its attempt has moved on."""
        ...

    async def update_attempt(
        self, rollout_id: str, attempt: int, status: AttemptStatus, *, error: str | None = None
    ) -> Rollout:
        """Move an attempt on and its rollout with it.

        A terminal or unresponsive attempt ends the rollout ("succeeded" or "failed"), or queues it again when
        `config.retry_on` names the status and attempts are left. "running" also counts as a heartbeat. A rollout that
        has ended stays as it is, and an attempt that a later one has replaced moves its rollout no more; an
        unresponsive attempt that comes back before its rollout is leased again takes it out of the queue.
        """
        ...

    async def heartbeat(self, rollout_id: str, attempt: int) -> None:
        """Say that an attempt is alive."""
        ...

    async def expire_attempts(self, now: float | None = None) -> list[Attempt]:
        """Give up attempts past `timeout_seconds` ("timeout") or `unresponsive_seconds` ("unresponsive"); requeue or
        fail their rollouts as in `update_attempt`. Returns those given up. To be called about once a second.

        What counts is how long this store has seen an attempt run or say nothing, so that neither a clock that is set
        nor time in which the store itself was down gives up anything. With `now` (seconds since the epoch) the times
        that are stored are compared with that instead.
        """
        ...

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """End rollouts that are not yet terminal with status "cancelled"; their open attempts become "failed"."""
        ...

    async def get_rollout(self, rollout_id: str) -> Rollout:
        """One rollout. A unique prefix of the id is enough. StoreError if there is none or several."""
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
        """Rollouts that fit every given filter, oldest first.

        Args:
            since: enqueued at that time or later; seconds since the epoch.
            after: those that come after the rollout of this id alone, so that the last of a page begins the next.
            limit: so many at most.
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
        """How many rollouts fit every given filter."""
        ...

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """A rollout's attempts in order."""
        ...

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Those of `rollout_ids` that are terminal, as soon as all are or `timeout` seconds have passed."""
        ...

    # -- calls and spans ------------------------------------------------------------------------------------------
    async def add_calls(self, calls: Sequence[Call]) -> None:
        """Record LLM calls; a call id that is there already is left as it is. Prompts that extend their parent call
        are stored as the suffix alone."""
        ...

    async def query_calls(self, rollout_id: str, attempt: int | None = None) -> list[Call]:
        """A rollout's calls by attempt and index, prompts whole. `attempt` None = all attempts."""
        ...

    async def add_spans(self, spans: Sequence[Span]) -> None:
        """Record spans; one that is there already (same trace and span id) is left as it is."""
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
        """(id, resources) of that version or of the latest; None when there is none."""
        ...

    async def add_policy_version(
        self, run_id: str, policy: str, version: int, step: int, checkpoint: str | None = None
    ) -> None:
        """Record that a version of a policy exists; repeating it updates `checkpoint`."""
        ...

    async def add_trained_calls(self, run_id: str, rows: Sequence[TrainedCall]) -> None:
        """Record what a step did with each call; the same call and step again replaces the row."""
        ...

    async def query_trained_calls(self, rollout_id: str) -> list[TrainedCall]:
        """What was done with a rollout's calls."""
        ...

    # -- the store itself -----------------------------------------------------------------------------------------
    async def prune(self, before: float, *, run_ids: Sequence[str] | None = None) -> Pruned:
        """Delete the attempts, calls and spans of rollouts that ended before that time (seconds since the epoch).

        The rollouts themselves, what was trained (`TrainedCall`, with every call's reward), resources and policy
        versions stay; rewards of calls that were not trained go with their spans. `run_ids` restricts it to these
        training runs. Others go on reading and writing meanwhile. The room is given back to the disk or kept for new
        rows, as the database does it.
        """
        ...

    async def close(self) -> None:
        """Finish what was acknowledged and release the database. Idempotent."""
        ...
