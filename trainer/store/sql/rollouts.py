"""The life cycle of rollouts and attempts, as functions of a connection; `_next_status` decides every transition."""

from __future__ import annotations

import dataclasses
import hmac
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Integer,
    LargeBinary,
    Select,
    Text,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal_column,
    select,
    update,
)

from agl.errors import AttemptOverError, NotStoredError, StoreError
from agl.trainer.store.sql import codec, statements
from agl.trainer.store.sql.clock import Beginnings, Observer
from agl.trainer.store.sql.dialect import Change, Changed, insert
from agl.trainer.store.sql.records import begins_with
from agl.trainer.store.sql.schema import attempts as A
from agl.trainer.store.sql.schema import calls, resources, spans
from agl.trainer.store.sql.schema import rollouts as R
from agl.trainer.store.types import (
    ATTEMPT_TERMINAL,
    ATTEMPT_TRANSITIONS,
    NO_RUN,
    ROLLOUT_TERMINAL,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    NewRollout,
    Rollout,
    RolloutStatus,
    new_rollout_id,
)

T = TypeVar("T")

CHUNK = 1000
"""Maximum number of ids in one statement; databases limit its parameters."""


def _end(begun: Any, at: Any, seconds: Any) -> ColumnElement[Any]:
    """When something ended that began at `begun`: `seconds` later, or `at` by a clock that may have been set back
    since, where it is not known how long it took. None of both stays None."""
    return func.coalesce(begun + seconds, case((begun > at, begun), else_=at))


def _end_of(begun: float, at: float, seconds: float | None) -> float:
    """As `_end`."""
    return max(begun, at) if seconds is None else begun + seconds


_ONE_ROLLOUT = select(R).where(R.c.rollout_id == bindparam("id"))
# Locked where transactions run concurrently: what is read here decides what is written.
_ROLLOUT_AND_ATTEMPT = (
    select(R, A.c.status.label("was"), A.c.last_heartbeat_at)
    .where(R.c.rollout_id == bindparam("id"), A.c.rollout_id == R.c.rollout_id, A.c.attempt == bindparam("n"))
    .with_for_update()
)
_INSERT_ROLLOUT = insert(R).on_conflict_do_nothing()
_INSERT_ATTEMPT = insert(A)
_SET_ROLLOUT = (
    update(R)
    .where(R.c.rollout_id == bindparam("id"))
    .values(status=bindparam("to", type_=Text), ended_at=bindparam("at", type_=Double))
)
_SET_ATTEMPT = (
    update(A)
    .where(A.c.rollout_id == bindparam("id"), A.c.attempt == bindparam("n"))
    .values(
        status=bindparam("to", type_=Text),
        error=func.coalesce(bindparam("why", type_=Text), A.c.error),
        last_heartbeat_at=bindparam("beat", type_=Double),
        ended_at=_end(A.c.started_at, bindparam("at", type_=Double), bindparam("seconds", type_=Double)),
    )
)
_CANCEL_ROLLOUT = (
    update(R)
    .where(R.c.rollout_id == bindparam("id"))
    .values(
        status="cancelled",
        ended_at=_end(R.c.created_at, bindparam("at", type_=Double), bindparam("seconds", type_=Double)),
    )
)
_CANCEL_ATTEMPT = (
    update(A)
    .where(A.c.rollout_id == bindparam("id"), A.c.attempt == bindparam("n"))
    .values(
        status="failed",
        error="the rollout was cancelled",
        ended_at=_end(A.c.started_at, bindparam("at", type_=Double), bindparam("seconds", type_=Double)),
    )
)
_OPEN = ("preparing", "running")
_ATTEMPTS_WITH_LIMITS = (
    select(A)
    .where(A.c.status.in_(_OPEN))
    .where(func.coalesce(A.c.timeout_seconds, A.c.unresponsive_seconds).is_not(None))
    .order_by(A.c.rollout_id, A.c.attempt)
)
_BEAT = (
    update(A)
    .where(A.c.rollout_id == bindparam("id"), A.c.attempt == bindparam("n"))
    .values(last_heartbeat_at=bindparam("beat", type_=Double))
)
_RENEW = _BEAT.values(secret_hash=bindparam("hash", type_=LargeBinary))
_ATTEMPT_STATUS = select(A.c.status).where(A.c.rollout_id == bindparam("id"), A.c.attempt == bindparam("n"))
_SECRET_HASH = select(A.c.secret_hash).where(A.c.rollout_id == bindparam("id"), A.c.attempt == bindparam("n"))
_LEASED_BY = (
    select(A)
    .join(R, and_(R.c.rollout_id == A.c.rollout_id, R.c.attempts == A.c.attempt))
    .where(A.c.request_id == bindparam("request"))
)
_PREPARING_OF = _LEASED_BY.where(A.c.status == "preparing", R.c.status == "preparing")
_OPEN_OF = _LEASED_BY.where(A.c.status.in_(_OPEN), R.c.status.in_(_OPEN))


def _next(*of: Any) -> Any:
    """Rollouts to lease, locked. PostgreSQL skips rows that others are leasing; SQLite runs one writer at a time."""
    # As a literal, so that the database uses the partial indexes.
    queued = select(R).where(R.c.status == literal_column("'queuing'"), *of)
    return queued.order_by(R.c.priority.desc(), R.c.seq).limit(bindparam("n")).with_for_update(skip_locked=True)


_NEXT = _next()
_NEXT_OF_RUN = _next(R.c.run_id == bindparam("run"))
_NEXT_OF_NONE = _next(R.c.run_id.is_(None))
_LEASE = (
    update(R)
    .where(R.c.rollout_id == bindparam("id"))
    .values(status="preparing", attempts=bindparam("n", type_=Integer))
)


# -- the queue ----------------------------------------------------------------------------------------------------
class Enqueued(NamedTuple):
    """Rollouts to add at `now`, seconds since the epoch."""

    new: Sequence[NewRollout]
    now: float


def enqueue(connection: Connection, each: Sequence[Enqueued]) -> list[Changed[list[Rollout]]]:
    """Add rollouts; each caller gets its own as stored, in the same order."""
    rows = [codec.rollout_row(n, n.rollout_id or new_rollout_id(), now) for new, now in each for n in new]
    if statements.change_many(connection, _INSERT_ROLLOUT, rows) == len(rows):
        stored = iter([codec.to_rollout(row) for row in rows])
    else:
        stored = iter(load(connection, [row["rollout_id"] for row in rows]))
    of_callers = [list(islice(stored, len(new))) for new, _ in each]
    return [
        Changed(rollouts, Change(Counter(r.run_id for r in rollouts if r.status == "queuing")))
        for rollouts in of_callers
    ]


@dataclasses.dataclass(slots=True)
class LeaseRequest:
    """A request for a rollout of a run, or of none (`NO_RUN`), or of any (None).

    `secret` is that of the lease from now on. `repeated`: whether the request may have a lease already.
    """

    worker_id: str | None
    run_id: str | None
    id: str
    secret: str
    now: float
    repeated: bool


def dequeue(connection: Connection, requests: Sequence[LeaseRequest]) -> list[AttemptedRollout | None]:
    """Lease the next queued rollouts and open their attempts; a repeated request gets its open lease, if it has one."""
    leased: dict[str, AttemptedRollout] = {}
    of_run: dict[str | None, list[LeaseRequest]] = {}
    # The same request can wait twice, if its client sent it again.
    for request in {request.id: request for request in requests}.values():
        if request.repeated and (before := _open_lease(connection, request)) is not None:
            leased[request.id] = before
        else:
            of_run.setdefault(request.run_id, []).append(request)
        # If this runs again after a broken connection, it may have leased a rollout already.
        request.repeated = True
    attempts = []
    for run_id, waiting in of_run.items():
        statement = _NEXT if run_id is None else _NEXT_OF_NONE if run_id == NO_RUN else _NEXT_OF_RUN
        values = {"run": run_id, "n": len(waiting)} if statement is _NEXT_OF_RUN else {"n": len(waiting)}
        rows = connection.execute(statement, values).mappings().all()
        updates = [{"id": row["rollout_id"], "n": row["attempts"] + 1} for row in rows]
        # Before the next run's: requests for any run would find the same rows again.
        statements.change_many(connection, _LEASE, updates)
        for row, request in zip(rows, waiting, strict=False):
            rollout = codec.to_rollout({**row, "status": "preparing", "attempts": row["attempts"] + 1})
            n = rollout.attempts
            now = request.now
            attempt = Attempt(rollout.rollout_id, n, "preparing", request.worker_id, None, now, now)
            attempts.append(codec.attempt_row(attempt, rollout.config, request.id, request.secret))
            leased[request.id] = AttemptedRollout(rollout, attempt, request.secret)
    statements.change_many(connection, _INSERT_ATTEMPT, attempts)
    return [leased.get(request.id) for request in requests]


def _open_lease(connection: Connection, request: LeaseRequest) -> AttemptedRollout | None:
    """The open lease of a repeated request, with a new secret; the repetition counts as a heartbeat."""
    (row,) = statements.first_each(connection, _PREPARING_OF, [{"request": request.id}])
    if row is None:
        return None
    attempt = dataclasses.replace(codec.to_attempt(row), last_heartbeat_at=request.now)
    secret_hash = codec.secret_hash(request.secret)
    values = {"id": attempt.rollout_id, "n": attempt.attempt, "beat": request.now, "hash": secret_hash}
    statements.change_many(connection, _RENEW, [values])
    (rollout,) = load(connection, [attempt.rollout_id])
    return AttemptedRollout(rollout, attempt, request.secret)


def start_attempt(connection: Connection, rollout_id: str, request: LeaseRequest) -> AttemptedRollout:
    """Open the rollout's next attempt, whatever its status; a repeated request gets the one that it opened."""
    if request.repeated and (before := _open_lease(connection, request)) is not None:
        return before
    row = connection.execute(_ONE_ROLLOUT.with_for_update(), {"id": rollout_id}).mappings().first()
    if row is None:
        raise no_rollout(rollout_id)
    n = row["attempts"] + 1
    now = request.now
    rollout = codec.to_rollout({**row, "status": "preparing", "attempts": n, "ended_at": None})
    connection.execute(
        update(R).where(R.c.rollout_id == rollout_id).values(status="preparing", attempts=n, ended_at=None)
    )
    attempt = Attempt(rollout_id, n, "preparing", request.worker_id, None, now, now)
    connection.execute(_INSERT_ATTEMPT, codec.attempt_row(attempt, rollout.config, request.id, request.secret))
    return AttemptedRollout(rollout, attempt, request.secret)


def is_leased_with(connection: Connection, rollout_id: str, attempt: int, secrets: Sequence[str]) -> bool:
    """Whether the attempt was leased with one of these secrets, compared in constant time."""
    stored = connection.execute(_SECRET_HASH, {"id": rollout_id, "n": attempt}).scalar() or b""
    # All of them, so that the time does not tell which one.
    return any([hmac.compare_digest(stored, codec.secret_hash(secret)) for secret in secrets])


def give_back_request(connection: Connection, request_id: str, begun: bool) -> Rollout | None:
    """Undo the lease of a request, whose attempt may be "running" only if `begun`. Returns its rollout, None without
    such a lease."""
    row = connection.execute(_OPEN_OF if begun else _PREPARING_OF, {"request": request_id}).mappings().first()
    if row is None:
        return None
    rollout = codec.to_rollout(connection.execute(_ONE_ROLLOUT, {"id": row["rollout_id"]}).mappings().one())
    return rollout if give_back(connection, AttemptedRollout(rollout, codec.to_attempt(row))) else None


def give_back(connection: Connection, leased: AttemptedRollout) -> bool:
    """Undo a lease that no caller received, without a trace. False if its attempt has moved on."""
    rollout_id = leased.rollout.rollout_id
    n = leased.attempt.attempt
    row = connection.execute(_ROLLOUT_AND_ATTEMPT, {"id": rollout_id, "n": n}).mappings().first()
    if row is None or row["last_heartbeat_at"] != leased.attempt.last_heartbeat_at:
        # The request was repeated in the meantime, and its caller has the lease.
        return False
    undone = connection.execute(
        update(R)
        .where(R.c.rollout_id == rollout_id, R.c.status.in_(_OPEN), R.c.attempts == n)
        .values(status="queuing", attempts=n - 1)
    )
    if undone.rowcount:
        connection.execute(delete(A).where(A.c.rollout_id == rollout_id, A.c.attempt == n))
    return bool(undone.rowcount)


# -- transitions --------------------------------------------------------------------------------------------------
def _next_status(rollout: Rollout, attempt: int, status: AttemptStatus) -> RolloutStatus:
    """The rollout's status after its attempt has got `status`.

    A terminal rollout keeps its status, and an attempt that a later one has replaced changes nothing. An unresponsive
    attempt that comes back before its rollout is leased again takes it out of the queue.
    """
    if rollout.status in ROLLOUT_TERMINAL or attempt != rollout.attempts or status == "preparing":
        return rollout.status
    if status in ("running", "succeeded"):
        return status
    if rollout.status == "queuing":
        return "queuing"
    again = status in rollout.config.retry_on and rollout.attempts < rollout.config.max_attempts
    return "queuing" if again else "failed"


class Move(NamedTuple):
    """A new status of an attempt, at `now`. `passed`, `ran`: seconds since its rollout was created and since it began,
    None where this process has not seen it."""

    rollout_id: str
    attempt: int
    status: AttemptStatus
    error: str | None
    now: float
    passed: float | None = None
    ran: float | None = None


def move(connection: Connection, moves: Sequence[Move]) -> list[Changed[Rollout] | Exception]:
    """Set the status of attempts, and of their rollouts accordingly, one after the other."""
    keys = sorted({(each.rollout_id, each.attempt) for each in moves})
    found = statements.first_each(connection, _ROLLOUT_AND_ATTEMPT, [{"id": id, "n": n} for id, n in keys])
    # Attempts of one rollout share its row, whose status each move may change.
    attempts = {key: dict(row) for key, row in zip(keys, found, strict=True) if row is not None}
    rollouts = {rollout_id: codec.to_rollout(row) for (rollout_id, _), row in attempts.items()}
    results: list[Changed[Rollout] | Exception] = []
    set_attempts: dict[tuple[str, int], dict[str, Any]] = {}
    set_rollouts: dict[str, dict[str, Any]] = {}
    for each in moves:
        row = attempts.get((each.rollout_id, each.attempt))
        if row is None:
            results.append(_no_attempt(each.rollout_id, each.attempt))
            continue
        rollout = rollouts[each.rollout_id]
        was = row["was"]
        if each.status != was and each.status not in ATTEMPT_TRANSITIONS[was]:
            after = ", ".join(sorted(ATTEMPT_TRANSITIONS[was]))
            final = f"{was!r} is final; the rollout was cancelled, expired or reported twice"
            error = AttemptOverError(
                f"attempt {each.attempt} of rollout {each.rollout_id} cannot go from {was!r} to {each.status!r}",
                hint=f"from {was!r} it can go to: {after}" if after else final,
            )
            results.append(error)
            continue
        if each.status != was or each.status == "running":
            row["was"] = each.status
            row["last_heartbeat_at"] = each.now if each.status == "running" else row["last_heartbeat_at"]
            why = codec.pack_text(each.error) if each.status != was else None
            before = set_attempts.get((each.rollout_id, each.attempt))
            set_attempts[each.rollout_id, each.attempt] = {
                "id": each.rollout_id,
                "n": each.attempt,
                "to": each.status,
                "why": before["why"] if why is None and before else why,
                "beat": row["last_heartbeat_at"],
                "at": each.now if each.status in ATTEMPT_TERMINAL else None,
                "seconds": each.ran if each.status in ATTEMPT_TERMINAL else None,
            }
        change = Change()
        if each.status != was and (to := _next_status(rollout, each.attempt, each.status)) != rollout.status:
            ended_at = _end_of(rollout.created_at, each.now, each.passed) if to in ROLLOUT_TERMINAL else None
            set_rollouts[each.rollout_id] = {"id": each.rollout_id, "to": to, "at": ended_at}
            rollout = rollouts[each.rollout_id] = dataclasses.replace(rollout, status=to, ended_at=ended_at)
            change = change_of([rollout])
        results.append(Changed(rollout, change))
    statements.change_many(connection, _SET_ATTEMPT, list(set_attempts.values()))
    statements.change_many(connection, _SET_ROLLOUT, list(set_rollouts.values()))
    return results


def change_of(rollouts: Sequence[Rollout]) -> Change:
    """The change by rollouts with new statuses: some are queued, some have ended."""
    queued = Counter(rollout.run_id for rollout in rollouts if rollout.status == "queuing")
    return Change(queued, [rollout.rollout_id for rollout in rollouts if rollout.status in ROLLOUT_TERMINAL])


def beat(connection: Connection, beats: Sequence[tuple[str, int, float]]) -> list[Exception | None]:
    """Record that attempts are alive: rollout id, attempt, time."""
    times = {(rollout_id, attempt): now for rollout_id, attempt, now in beats}
    rows = [{"id": rollout_id, "n": n, "beat": now} for (rollout_id, n), now in sorted(times.items())]
    if statements.change_many(connection, _BEAT, rows) == len(rows):
        return [None] * len(beats)
    keys = [{"id": rollout_id, "n": n} for rollout_id, n, _ in beats]
    attempts = statements.first_each(connection, _ATTEMPT_STATUS, keys)
    return [_no_attempt(key["id"], key["n"]) if row is None else None for key, row in zip(keys, attempts, strict=True)]


def expire(
    connection: Connection, now: float, observer: Observer | None, beginnings: Beginnings
) -> tuple[list[Attempt], list[Rollout]]:
    """End attempts past their limits. Returns these, and their rollouts with the new statuses.

    Ages are the observer's; without one, the stored times are compared with `now`.
    """
    rows = connection.execute(_ATTEMPTS_WITH_LIMITS).mappings().all()
    if observer is not None:
        ages = observer.look((row["rollout_id"], row["attempt"], row["last_heartbeat_at"]) for row in rows)
    else:
        ages = {
            (row["rollout_id"], row["attempt"]): (now - row["started_at"], now - row["last_heartbeat_at"])
            for row in rows
        }
    expired = []
    rollouts = []
    for row in rows:
        ran, silent = ages[row["rollout_id"], row["attempt"]]
        timeout = row["timeout_seconds"]
        limit = row["unresponsive_seconds"]
        status: AttemptStatus
        if timeout is not None and ran >= timeout:
            status = "timeout"
            why = f"still running {timeout:g} s after it was leased, its limit"
        elif limit is not None and silent >= limit:
            status = "unresponsive"
            why = f"no heartbeat for {silent:.1f} s (limit {limit:g} s)"
        else:
            continue
        values = {"id": row["rollout_id"], "n": row["attempt"]}
        present = connection.execute(_ROLLOUT_AND_ATTEMPT, values).mappings().one()
        if (present["was"], present["last_heartbeat_at"]) != (row["status"], row["last_heartbeat_at"]):
            # Another process was faster.
            continue
        passed = seconds = None
        if observer is not None:
            passed = beginnings.seconds(row["rollout_id"])
            seconds = beginnings.seconds((row["rollout_id"], row["attempt"]))
        (moved,) = move(connection, [Move(row["rollout_id"], row["attempt"], status, why, now, passed, seconds)])
        if isinstance(moved, Exception):
            raise moved
        rollouts.append(moved.result)
        ended_at = _end_of(row["started_at"], now, seconds) if status in ATTEMPT_TERMINAL else None
        expired.append(dataclasses.replace(codec.to_attempt(row), status=status, error=why, ended_at=ended_at))
    return expired, rollouts


def set_fields(
    connection: Connection, rollout_id: str, values: Mapping[str, Any], now: float, passed: float | None
) -> Changed[Rollout]:
    """Set fields of a rollout, which was created `passed` seconds ago; None where that is not known."""
    row = connection.execute(_ONE_ROLLOUT.with_for_update(), {"id": rollout_id}).mappings().first()
    if row is None:
        raise no_rollout(rollout_id)
    columns = codec.rollout_columns(rollout_id, values)
    if "status" in columns:
        ended_at = row["ended_at"] or _end_of(row["created_at"], now, passed)
        columns["ended_at"] = ended_at if columns["status"] in ROLLOUT_TERMINAL else None
    if columns:
        connection.execute(update(R).where(R.c.rollout_id == rollout_id).values(columns))
    rollout = codec.to_rollout({**row, **columns})
    if "config" in columns:
        connection.execute(
            update(A)
            .where(A.c.rollout_id == rollout_id, A.c.status.not_in(sorted(ATTEMPT_TERMINAL)))
            .values(
                timeout_seconds=rollout.config.timeout_seconds, unresponsive_seconds=rollout.config.unresponsive_seconds
            )
        )
    return Changed(rollout, change_of([rollout]) if "status" in columns else Change())


def cancel(connection: Connection, rollout_ids: Sequence[str], now: float, beginnings: Beginnings) -> None:
    """End the rollouts that are not terminal, and their open attempts."""
    statuses(connection, rollout_ids)
    for ids in chunks(rollout_ids):
        open_rollouts = R.c.rollout_id.in_(ids) & R.c.status.not_in(sorted(ROLLOUT_TERMINAL))
        cancelled = connection.scalars(select(R.c.rollout_id).where(open_rollouts).with_for_update()).all()
        open_attempts = A.c.rollout_id.in_(cancelled) & A.c.status.not_in(sorted(ATTEMPT_TERMINAL))
        attempts = connection.execute(select(A.c.rollout_id, A.c.attempt).where(open_attempts)).all()
        ended = [{"id": id, "at": now, "seconds": beginnings.seconds(id)} for id in cancelled]
        statements.change_many(connection, _CANCEL_ROLLOUT, ended)
        failed = [{"id": id, "n": n, "at": now, "seconds": beginnings.seconds((id, n))} for id, n in attempts]
        statements.change_many(connection, _CANCEL_ATTEMPT, failed)


# -- queries ------------------------------------------------------------------------------------------------------
def load(connection: Connection, rollout_ids: Sequence[str]) -> list[Rollout]:
    """These rollouts, in the same order."""
    rows = statements.first_each(connection, _ONE_ROLLOUT, [{"id": rollout_id} for rollout_id in rollout_ids])
    return [codec.to_rollout(row) for row in rows if row is not None]


def statuses(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, RolloutStatus]:
    """The status of each rollout; StoreError if one does not exist."""
    status_of: dict[str, RolloutStatus] = {}
    for ids in chunks(rollout_ids):
        rows = connection.execute(select(R.c.rollout_id, R.c.status).where(R.c.rollout_id.in_(ids)))
        status_of.update((rollout_id, status) for rollout_id, status in rows)
    for rollout_id in rollout_ids:
        if rollout_id not in status_of:
            raise no_rollout(rollout_id)
    return status_of


def get(connection: Connection, rollout_id: str) -> Rollout:
    """The rollout with that id, or the only one whose id begins with it."""
    row = connection.execute(_ONE_ROLLOUT, {"id": rollout_id}).mappings().first()
    if row is not None:
        return codec.to_rollout(row)
    found = select(R).where(begins_with(R.c.rollout_id, rollout_id)).limit(2)
    rows = connection.execute(found).mappings().all() if rollout_id else []
    if not rows:
        raise no_rollout(rollout_id)
    if len(rows) > 1:
        names = " and ".join(row["rollout_id"] for row in rows)
        raise StoreError(f"several rollouts begin with {rollout_id!r}: {names}", hint="give more digits of the id")
    return codec.to_rollout(rows[0])


def matching(
    statement: Select[Any],
    run_id: str | None = None,
    step: int | None = None,
    mode: str | None = None,
    status: Sequence[str] | None = None,
    since: float | None = None,
) -> Select[Any]:
    """The statement, restricted to rollouts that match; None is no condition. `since`: the least `created_at`."""
    for column, value in ((R.c.run_id, run_id), (R.c.step, step), (R.c.mode, mode)):
        if value is not None:
            statement = statement.where(column == value)
    if status is not None:
        statement = statement.where(R.c.status.in_(list(status)))
    return statement if since is None else statement.where(R.c.created_at >= since)


def query(connection: Connection, *, after: str | None, limit: int | None, **conditions: Any) -> list[Rollout]:
    """Matching rollouts, oldest first, starting after the one with the id `after`."""
    statement = matching(select(R), **conditions).order_by(R.c.seq)
    if after is not None:
        seq = connection.execute(select(R.c.seq).where(R.c.rollout_id == after)).scalar()
        if seq is None:
            raise no_rollout(after)
        statement = statement.where(R.c.seq > seq)
    if limit is not None:
        statement = statement.limit(limit)
    return [codec.to_rollout(row) for row in connection.execute(statement).mappings()]


def count(connection: Connection, **conditions: Any) -> int:
    """The number of matching rollouts."""
    return connection.execute(matching(select(func.count()).select_from(R), **conditions)).scalar_one()


def statistics(connection: Connection) -> dict[str, int]:
    """The rows of the tables, and the rollouts by status."""
    by_status = connection.execute(select(R.c.status, func.count()).group_by(R.c.status)).all()
    counts = {
        table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
        for table in (R, A, calls, spans, resources)
    }
    return {**counts, **{status: number for status, number in by_status}}


def query_attempts(connection: Connection, rollout_id: str) -> list[Attempt]:
    """A rollout's attempts in order."""
    statuses(connection, [rollout_id])
    rows = connection.execute(select(A).where(A.c.rollout_id == rollout_id).order_by(A.c.attempt)).mappings()
    return [codec.to_attempt(row) for row in rows]


def query_open_attempts(connection: Connection, limit: int) -> list[Attempt]:
    """The attempts that run, of the oldest rollout first. An unresponsive one may never end: it is not among them."""
    of_rollout = select(A).join(R, R.c.rollout_id == A.c.rollout_id)
    statement = of_rollout.where(A.c.status.in_(_OPEN)).order_by(R.c.seq, A.c.attempt).limit(limit)
    return [codec.to_attempt(row) for row in connection.execute(statement).mappings()]


def chunks(ids: Sequence[T]) -> Iterator[Sequence[T]]:
    """`ids` in parts that fit one statement."""
    for start in range(0, len(ids), CHUNK):
        yield list(ids[start : start + CHUNK])


def no_rollout(rollout_id: str) -> NotStoredError:
    return NotStoredError(f"there is no rollout {rollout_id!r}", hint="check the id, and that this is the right store")


def _no_attempt(rollout_id: str, attempt: int) -> NotStoredError:
    return NotStoredError(
        "there is no such attempt", hint="attempts are opened by dequeue_rollout", rollout=rollout_id, attempt=attempt
    )
