"""Runs, their metrics, and the rollouts of a step as rows of a table, as functions of a connection."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    case,
    delete,
    func,
    or_,
    select,
    tuple_,
    update,
)

from agl import semconv
from agl.errors import NotStoredError, RewardError
from agl.mdp.spans import sequence_of
from agl.mdp.types import Reward, without_superseded
from agl.trainer.store.sql import codec, statements
from agl.trainer.store.sql.records import TOKEN_BYTES, upsert
from agl.trainer.store.sql.rollouts import CHUNK, chunks, matching, statuses
from agl.trainer.store.sql.schema import attempts as A
from agl.trainer.store.sql.schema import calls as C
from agl.trainer.store.sql.schema import metrics as M
from agl.trainer.store.sql.schema import rollouts as R
from agl.trainer.store.sql.schema import runs as N
from agl.trainer.store.sql.schema import spans as S
from agl.trainer.store.sql.schema import trained_calls as T
from agl.trainer.store.types import Metric, RolloutSummary, TrainingRun

_KEPT = ("seq", "run_id", "created_at")
_UPSERT_RUN = upsert(N, [column.name for column in N.columns if column.name not in _KEPT], key=["run_id"])
_UPSERT_METRIC = upsert(M, ["value"])
_TOUCH = update(N).where(N.c.run_id == bindparam("id")).values(updated_at=bindparam("now"))


# -- runs ---------------------------------------------------------------------------------------------------------
def put(connection: Connection, row: Mapping[str, Any]) -> None:
    """Insert a run, or replace all but its `created_at`."""
    connection.execute(_UPSERT_RUN, dict(row))


def query(connection: Connection, run_ids: Sequence[str] | None, after: str | None, limit: int) -> list[TrainingRun]:
    """Runs, newest first, whatever the clock said when each was recorded."""
    statement = select(N).order_by(N.c.seq.desc()).limit(limit)
    if run_ids is not None:
        statement = statement.where(N.c.run_id.in_(list(run_ids)))
    if after is not None:
        seq = connection.execute(select(N.c.seq).where(N.c.run_id == after)).scalar()
        if seq is None:
            raise _no_run(after)
        statement = statement.where(N.c.seq < seq)
    return [codec.to_run(row) for row in connection.execute(statement).mappings()]


# -- metrics ------------------------------------------------------------------------------------------------------
def add_metrics(connection: Connection, run_id: str, rows: Sequence[Mapping[str, Any]], now: float) -> None:
    """Insert or replace metrics of a run, which is written at `now`."""
    if not connection.execute(_TOUCH, {"id": run_id, "now": now}).rowcount:
        raise _no_run(run_id)
    if rows:
        statements.change_many(connection, _UPSERT_METRIC, rows)


def delete_metrics(connection: Connection, run_id: str, after_step: int) -> None:
    """Delete the metrics of later steps."""
    connection.execute(delete(M).where(M.c.run_id == run_id, M.c.step > after_step))


def query_metrics(
    connection: Connection,
    run_ids: Sequence[str],
    names: Sequence[str] | None,
    after_step: int | None,
    ends: bool,
    limit: int,
) -> list[Metric]:
    """Metrics by step, then name."""
    later = [] if after_step is None else [M.c.step > after_step]
    packed = None if names is None else [codec.pack_text(name) for name in names]
    if ends:
        return _query_ends(connection, run_ids, packed, later, limit)
    statement = select(M).where(M.c.run_id.in_(list(run_ids)), *later)
    if packed is not None:
        statement = statement.where(M.c.name.in_(packed))
    rows = connection.execute(statement.order_by(M.c.step, M.c.name, M.c.run_id).limit(limit))
    return [codec.to_metric(row) for row in rows]


def _query_ends(
    connection: Connection,
    run_ids: Sequence[str],
    packed: Sequence[str | None] | None,
    later: Sequence[ColumnElement[bool]],
    limit: int,
) -> list[Metric]:
    """The first and the last metric of each run and name, by step, then name.

    The time does not depend on the number of steps: the names are found one after the other in the index, and so are
    the ends of each (a "loose index scan", which neither database does by itself).
    """
    first_name = select(func.min(M.c.name)).where(M.c.run_id == N.c.run_id).scalar_subquery()
    runs = select(N.c.run_id, first_name.label("name")).where(N.c.run_id.in_(list(run_ids)))
    names = runs.cte("names", recursive=True)
    next_name = select(func.min(M.c.name)).where(M.c.run_id == names.c.run_id, M.c.name > names.c.name)
    names = names.union_all(select(names.c.run_id, next_name.scalar_subquery()).where(names.c.name.is_not(None)))

    def end(column: ColumnElement[Any], order: ColumnElement[Any]) -> ColumnElement[Any]:
        of_name = select(column).where(M.c.run_id == names.c.run_id, M.c.name == names.c.name, *later)
        return of_name.order_by(order).limit(1).scalar_subquery()

    ends = [end(column, order) for order in (M.c.step, M.c.step.desc()) for column in (M.c.step, M.c.value)]
    statement = select(names, *ends).where(names.c.name.is_not(None))
    if packed is not None:
        statement = statement.where(names.c.name.in_(packed))
    found = {
        codec.to_metric((run_id, step, name, value))
        for run_id, name, first, first_value, last, last_value in connection.execute(statement)
        for step, value in ((first, first_value), (last, last_value))
        if step is not None
    }
    return sorted(found, key=lambda m: (m.step, m.name, m.run_id))[:limit]


# -- a step's rollouts --------------------------------------------------------------------------------------------
def query_step(
    connection: Connection, run_id: str, step: int, mode: str, group: str | None, after: str | None, limit: int
) -> list[RolloutSummary]:
    """A step's rollouts in the order of their places, which is also that of their groups.

    One query for the rollouts, and two for each `CHUNK` of them; no prompt, response or text of a call is read.
    """
    statement = matching(_SUMMARIES, run_id, step, mode).limit(limit)
    if group is not None:
        statement = statement.where(R.c.group_key == codec.pack_text(group))
    if after is not None:
        other = R.alias()
        place = select(other.c.position, other.c.seq).where(other.c.rollout_id == after).scalar_subquery()
        statement = statement.where(tuple_(R.c.position, R.c.seq) > place)
    rows = connection.execute(statement).mappings().all()
    if after is not None and not rows:
        statuses(connection, [after])
    return _summaries(connection, rows)


def find_rollouts(
    connection: Connection,
    run_id: str,
    mode: str,
    text: str | None,
    agent: str | None,
    tool: str | None,
    failed: bool,
    least: float | None,
    most: float | None,
    before: str | None,
    limit: int,
) -> list[RolloutSummary]:
    """Rollouts of all steps, newest first. Rewards are in spans, so their bounds are checked here, page by page."""
    statement = _SUMMARIES.where(R.c.run_id == run_id, R.c.mode == mode)
    of_rollout = select(C.c.id).where(C.c.rollout_id == R.c.rollout_id)
    if text is not None:
        within = codec.dumps(codec.pack_text(text), "a text")[1:-1]
        sent = or_(C.c.request.icontains(within, autoescape=True), C.c.answer.icontains(within, autoescape=True))
        statement = statement.where(
            or_(
                R.c.task.icontains(within, autoescape=True),
                A.c.error.icontains(codec.pack_text(text), autoescape=True),
                of_rollout.where(sent).exists(),
            )
        )
    if agent is not None:
        statement = statement.where(of_rollout.where(C.c.agent == codec.pack_text(agent)).exists())
    if tool is not None:
        named = f'"name":{codec.dumps(codec.pack_text(tool), "a tool")}'
        statement = statement.where(of_rollout.where(C.c.answer.contains(named, autoescape=True)).exists())
    if failed:
        statement = statement.where(R.c.status == "failed")
    found: list[RolloutSummary] = []
    bounded = least is not None or most is not None
    newest_first = statement.order_by(None).order_by(R.c.seq.desc()).limit(CHUNK if bounded else limit)
    while len(found) < limit:
        page = newest_first
        if before is not None:
            other = R.alias()
            page = page.where(R.c.seq < select(other.c.seq).where(other.c.rollout_id == before).scalar_subquery())
        rows = connection.execute(page).mappings().all()
        if before is not None and not rows:
            statuses(connection, [before])
        found += [
            summary
            for summary in _summaries(connection, rows)
            if not bounded
            or (
                summary.reward is not None
                and (least is None or summary.reward >= least)
                and (most is None or summary.reward <= most)
            )
        ]
        if not bounded or len(rows) < CHUNK:
            break
        before = rows[-1]["rollout_id"]
    return found[:limit]


def _summaries(connection: Connection, rows: Sequence[Any]) -> list[RolloutSummary]:
    """The summaries of rows of `_SUMMARIES`."""
    ids = [row["rollout_id"] for row in rows]
    calls = _calls(connection, ids)
    rewards = _rewards(connection, ids)
    return [
        RolloutSummary(
            codec.to_rollout(row),
            codec.unpack_text(row["why"]),
            tuple(rewards[row["rollout_id"]]),
            trained_tokens=row["trained"] or 0,
            zero_advantage_tokens=row["idle"] or 0,
            advantage=row["weighted"] / row["trained"] if row["trained"] else None,
            dropped=row["dropped"],
            **calls[row["rollout_id"]],
        )
        for row in rows
    ]


def _trained(value: ColumnElement[Any]) -> ColumnElement[Any]:
    """An aggregate of a rollout's training records, which outlive its calls."""
    return select(value).where(T.c.rollout_id == R.c.rollout_id, T.c.run_id == R.c.run_id).scalar_subquery()


_SUMMARIES = (
    select(
        R,
        A.c.error.label("why"),
        _trained(func.sum(T.c.tokens)).label("trained"),
        _trained(func.sum(case((T.c.advantage == 0, T.c.tokens), else_=0))).label("idle"),
        _trained(func.sum(T.c.advantage * T.c.tokens)).label("weighted"),
        _trained(func.max(T.c.dropped)).label("dropped"),
    )
    .outerjoin(A, and_(A.c.rollout_id == R.c.rollout_id, A.c.attempt == R.c.attempts))
    .order_by(R.c.position, R.c.seq)
)
_COUNTED_CALLS = (
    select(
        C.c.rollout_id,
        C.c.agent,
        func.count().label("calls"),
        func.count(C.c.error).label("failed_calls"),
        func.count(C.c.fork_cause).label("forks"),
        func.sum(func.length(C.c.response)).label("bytes"),
    )
    .join(R, and_(R.c.rollout_id == C.c.rollout_id, R.c.attempts == C.c.attempt))
    .where(C.c.rollout_id.in_(bindparam("ids", expanding=True)))
    .group_by(C.c.rollout_id, C.c.agent)
    .order_by(func.min(C.c.position))
)
_REWARD_SPANS = (
    select(S.c.rollout_id, S.c.parent_id, S.c.attributes)
    .join(R, and_(R.c.rollout_id == S.c.rollout_id, R.c.attempts == S.c.attempt))
    # The name tells which spans can be a reward's: the attributes of the others hold whole conversations.
    .where(S.c.rollout_id.in_(bindparam("ids", expanding=True)), S.c.name.startswith(semconv.REWARD))
    .order_by(S.c.started_at, S.c.span_id)
)


def _calls(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The fields of `RolloutSummary` that count the calls of the last attempts."""
    fields: dict[str, dict[str, Any]] = {
        rollout_id: {"agents": (), "calls": 0, "failed_calls": 0, "forks": 0, "tokens": 0} for rollout_id in rollout_ids
    }
    for ids in chunks(rollout_ids):
        for row in connection.execute(_COUNTED_CALLS, {"ids": ids}).mappings():
            of_rollout = fields[row["rollout_id"]]
            of_rollout["agents"] += (codec.unpack_text(row["agent"]),)
            of_rollout["tokens"] += row["bytes"] // TOKEN_BYTES
            for name in ("calls", "failed_calls", "forks"):
                of_rollout[name] += row[name]
    return fields


def _rewards(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, list[Reward]]:
    """The rewards of the last attempts, in the order in which they were earned."""
    rewards: dict[str, list[Reward]] = {rollout_id: [] for rollout_id in rollout_ids}
    for ids in chunks(rollout_ids):
        rows = [(row[0], row[1], codec.loads(row[2])) for row in connection.execute(_REWARD_SPANS, {"ids": ids})]
        for rollout_id, parent_id, attributes in sorted(rows, key=lambda row: sequence_of(row[2]) or 0):
            try:
                reward = Reward.of_span(attributes, parent_id)
            except RewardError:
                # Another program's span; training refuses its rollout, and a table is to show the others.
                continue
            if reward is not None:
                rewards[rollout_id].append(reward)
    return {
        rollout_id: [r for r in without_superseded(several, lambda r: r) if math.isfinite(r.value)]
        for rollout_id, several in rewards.items()
    }


def _no_run(run_id: str) -> NotStoredError:
    return NotStoredError(f"there is no run {run_id!r}", hint="check the id, and that this is the right store")
