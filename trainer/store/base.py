"""The store as one async interface: five Protocols, which one object fulfils.

Every method can be called from any task of any event loop. Once it has returned, its effect survives a kill of any
process. Tasks, metadata, resources, attributes and messages are JSON values, so tuples in them come back as lists.
Errors are `agl.errors.StoreError`: an unknown id, a transition that `ATTEMPT_TRANSITIONS` forbids, a full disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.trainer.store.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    MemoryEntry,
    MemoryId,
    Metric,
    Mode,
    NewRollout,
    Pruned,
    Rollout,
    RolloutStatus,
    RolloutSummary,
    TrainedCall,
    TrainingRun,
)


class Rollouts(Protocol):
    """Rollouts and their attempts: the queue, leases, and how they end."""

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

    async def give_back(self, request_id: str, *, begun: bool = False) -> None:
        """Undo the lease of a request whose caller has gone. No effect without one, or if its attempt has moved on.

        Args:
            begun: also undo an attempt that is "running" already, for a caller that knows that nobody works on it.
        """
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

    async def query_open_attempts(self, *, limit: int = 1000) -> list[Attempt]:
        """The attempts that are "preparing" or "running", of the oldest rollout first: what every runner is doing."""
        ...

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """The terminal ones of these rollouts, as soon as all are terminal or `timeout` seconds have passed."""
        ...


class Records(Protocol):
    """What happened in the attempts: calls and spans, and what training made of the calls."""

    async def add_calls(self, calls: Sequence[Call]) -> None:
        """Record LLM calls. A call whose id is stored already stays unchanged; but where its answer has turned out to
        be lost (it is "cancelled" now, and had no error), its finish reason and error are replaced. Of a prompt that
        extends the parent call only the suffix is stored."""
        ...

    async def query_calls(self, rollout_id: str, attempt: int | None = None) -> list[Call]:
        """A rollout's calls by attempt and index, with complete prompts. `attempt` None = all attempts."""
        ...

    async def add_spans(self, spans: Sequence[Span]) -> None:
        """Record spans. A span that is stored already (same trace and span id) stays unchanged."""
        ...

    async def move_spans(self, rollout_id: str, to_rollout_id: str, to_attempt: int) -> None:
        """Assign all spans of a rollout to an attempt of another one."""
        ...

    async def query_spans(self, rollout_id: str, attempt: int | None = None) -> list[Span]:
        """A rollout's spans by start time."""
        ...

    async def add_trained_calls(self, run_id: str, rows: Sequence[TrainedCall]) -> None:
        """Record what a training step did with each call. A row with the same call and step is replaced."""
        ...

    async def query_trained_calls(self, rollout_id: str) -> list[TrainedCall]:
        """The training records of a rollout's calls."""
        ...


class Resources(Protocol):
    """Named resources in versions, and notes."""

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


class Runs(Protocol):
    """Training runs with their metrics, policies and steps."""

    async def put_run(self, run: TrainingRun) -> None:
        """Record a run, or replace what is recorded of it. `created_at` of the first record stays; 0 stands for now."""
        ...

    async def query_runs(
        self, *, run_ids: Sequence[str] | None = None, after: str | None = None, limit: int = 100
    ) -> list[TrainingRun]:
        """Runs, newest first.

        Args:
            run_ids: these alone, where they exist.
            after: only runs older than the one with this id, for paging.
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
            names: these alone.
            after_step: of later steps alone.
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
        """One step's rollouts, in the order of their groups and places, and of one place in the order in which they
        were made, in a bounded number of database queries.

        Args:
            step: as in `Rollout`: training counts from 0, and a validation has the number of steps that are done.
            group: of this group alone.
            after: only rollouts after the one with this id, for paging.
            limit: maximum number of rollouts.
        """
        ...

    async def find_rollouts(
        self,
        run_id: str,
        *,
        mode: Mode = "train",
        text: str | None = None,
        agent: str | None = None,
        tool: str | None = None,
        failed: bool = False,
        least: float | None = None,
        most: float | None = None,
        before: str | None = None,
        limit: int = 100,
    ) -> list[RolloutSummary]:
        """Rollouts of all steps that match every condition, newest first.

        Args:
            text: in its task, its error, or what its calls sent or answered, in any case of ASCII letters.
            agent: made one of its calls.
            tool: was called by its model.
            failed: it failed.
            least, most: bounds of its reward, included; one without a reward has none.
            before: only rollouts older than the one with this id, for paging.
            limit: maximum number of rollouts.
        """
        ...

    async def add_policy_version(
        self, run_id: str, policy: str, version: int, step: int, checkpoint: str | None = None
    ) -> None:
        """Record a version of a policy; a repetition updates `checkpoint`."""
        ...


class Memories(Protocol):
    """The entries of memories, in versions of a scope."""

    async def merge_memories(
        self, scope: str, version: int, entries: Sequence[MemoryEntry] = (), removed: Sequence[MemoryId] = ()
    ) -> None:
        """Make a new version of a scope: these entries are added, or replace those with their namespace and key, and
        the removed ones are seen no more. Earlier versions stay as they are; a repetition has no effect.

        Args:
            scope: a run's id, or a memory's name.
            version: not less than any before.
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


class Store(Rollouts, Records, Resources, Runs, Memories, Protocol):
    """A whole store. Functions that need one part of it ask for that part."""

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
