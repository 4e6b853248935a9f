"""Where traces are kept: a view on agl's store, from which the JSON files are written.

Invariant: what happened is stored as it happens, by a thread that never holds an agent up; files are made of what is
stored, so a process that is killed loses none of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agl import semconv
from agl.errors import ConfigError, StoreError
from agl.mdp.order import number_after
from agl.mdp.spans import Span, recorded
from agl.tracing.exporter import EXIT_SECONDS, BackgroundSpanExporter
from agl.trainer.report.export.rows import RolloutFilter, record, records
from agl.trainer.report.export.to_files import to_files
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.collect import moment, new_rollout
from agl.trainer.store.location import read_store, store_url
from agl_massgen.config import StoreConfig
from agl_massgen.files import MassGenFiles, RewardSpan, Trace, TraceStatus, traces

log = logging.getLogger("agl.massgen")


@dataclass(frozen=True, slots=True)
class Begun:
    """A rollout whose spans are on their way to the store: what it was asked, its outermost agent, when it began by the
    monotonic clock."""

    task: str
    agent: str
    began: float


class LightningStore:
    """Traces of agents, kept in agl's store and, of a local one, as JSON files next to it.

    Args:
        config: where; `./rl_data` if None. A path stands for `StoreConfig(path=...)`.
    """

    def __init__(self, config: StoreConfig | str | Path | None = None) -> None:
        if isinstance(config, str | Path):
            config = StoreConfig("remote" if "://" in str(config) else "local", str(config))
        self.config = config or StoreConfig()
        self.folder = Path(self.config.path) if self.config.type == "local" else None
        self._begun: dict[str, Begun] = {}
        self._lock = threading.Lock()
        self._exporter: BackgroundSpanExporter | None = None
        self._finish: Any = None

    @property
    def url(self) -> str:
        """The URL of agl's store, for `agl export`, `agl dashboard` and `agl.traces`."""
        return store_url(self.config.path if self.folder is None else f"{self.folder}/run.db")

    def begin(self, rollout_id: str, begun: Begun) -> None:
        """Take a rollout's spans from now on; it ends with its root span."""
        self._begun[rollout_id] = begun

    def put(self, span: Span) -> None:
        """Store a finished span; does not wait for it."""
        with self._lock:
            if self._exporter is None:
                if self.folder is not None:
                    self.folder.mkdir(parents=True, exist_ok=True)
                url = self.url
                folder = self.folder
                begun = self._begun
                self._exporter = BackgroundSpanExporter(lambda: _Sink(url, folder, begun), _lost)
                self._finish = weakref.finalize(self, self._exporter.finish, None)
            self._exporter.put(span)

    def flush(self, seconds: float = EXIT_SECONDS) -> bool:
        """Wait until everything so far is stored and its files are written; False if that takes longer."""
        return self._exporter is None or self._exporter.flush(seconds)

    def close(self) -> None:
        """Store the rest and close the store. A span that comes later opens it again."""
        if self._finish is not None:
            self._finish()
        self._exporter = self._finish = None

    # -- queries --------------------------------------------------------------------------------------------------
    def get_trace(self, trace_id: str) -> Trace:
        """One trace.

        Raises:
            StoreError: there is none of this id.
        """

        async def query(store: Store) -> list[Trace]:
            return traces(await record(store, await store.get_rollout(_rollout_id(trace_id))))

        found = next((t for t in self._read(query) if t.trace_id == trace_id), None)
        if found is None:
            raise StoreError("there is no trace of this id", hint="query_traces() lists them", trace=trace_id)
        return found

    def query_traces(
        self,
        *,
        agent_id: str | None = None,
        status: TraceStatus | None = None,
        min_reward: float | None = None,
        since: float | None = None,
        limit: int | None = None,
    ) -> list[Trace]:
        """The traces that fit all conditions, in the order in which their rollouts were stored.

        Args:
            min_reward: the least total reward.
            since: begun at that time or later, in seconds since the epoch.
        """

        def fits(trace: Trace) -> bool:
            return (
                (agent_id is None or trace.agent_id == agent_id)
                and (status is None or trace.status == status)
                and (min_reward is None or trace.total_reward >= min_reward)
            )

        async def query(store: Store) -> list[Trace]:
            which = RolloutFilter(since=since)
            found = []
            async for one in records(store, which, await which.count(store)):
                found += filter(fits, traces(one))
                if limit is not None and len(found) >= limit:
                    break
            return found[:limit]

        return self._read(query)

    def add_reward(self, trace_id: str, reward: RewardSpan) -> None:
        """Add a reward to a trace that has ended. It counts.

        Raises:
            StoreError: there is no such trace, or it has not ended.
        """

        async def add(store: Store) -> None:
            rollout = await store.get_rollout(_rollout_id(trace_id))
            spans = await store.query_spans(rollout.rollout_id)
            run = next((s for s in spans if trace_id.endswith(s.span_id)), None)
            run = run or next((s for s in spans if s.parent_id is None), None)
            if run is None:
                raise StoreError("this trace has not ended", hint="rate it when it has", trace=trace_id)
            facts = {
                semconv.REWARD_NAME: reward.reward_type,
                semconv.REWARD_VALUE: float(reward.reward),
                semconv.REWARD_PRIMARY: True,
                semconv.REWARD_SOURCE: "emit",
                semconv.VALUE: reward.reason,
                semconv.SEQUENCE: number_after(spans),
            }
            where = {"parent_id": run.span_id, "start": run.end, "end": run.end}
            rated = recorded(run, semconv.REWARD, reward.reward_type, run.agent or "", facts, **where)
            await store.add_spans([rated])
            if self.folder is not None:
                await _write(store, self.folder, [rollout.rollout_id])

        self._read(add)

    def write_files(self, folder: str | Path | None = None) -> int:
        """Write the JSON files of everything that is stored; those of a process that was killed are missing until then.

        Args:
            folder: where to; the store's own folder if None.

        Returns:
            The number of rollouts.

        Raises:
            ConfigError: a remote store has no folder.
            ExportError: nothing is stored yet.
        """
        out = self.folder if folder is None else Path(folder)
        if out is None:
            raise ConfigError("a remote store has no folder", hint="write_files(folder)")
        return self._read(lambda store: to_files(store, out, "massgen", RolloutFilter(), quiet=True))["rollouts"]

    def _read(self, query: Callable[[Store], Awaitable[Any]]) -> Any:
        self.flush()
        return read_store(self.url, query)


class _Sink:
    """The store's end of the thread that writes: rollouts begin with their first span and end with their root."""

    def __init__(self, url: str, folder: Path | None, begun: dict[str, Begun]) -> None:
        self._folder = folder
        self._begun = begun
        self._known: set[str] = set()
        self._runner = asyncio.Runner()
        try:
            self._store = self._runner.run(open_store(url))
        except BaseException:
            self._runner.close()
            raise

    def send(self, spans: Sequence[Span]) -> None:
        """Store spans, and write the files of the rollouts that have ended. Returns when that is done."""
        self._runner.run(self._send(spans))

    def finish(self, error: str | None) -> None:
        """Close the store."""
        with self._runner:
            self._runner.run(self._store.close())

    async def _send(self, spans: Sequence[Span]) -> None:
        for rollout_id in {s.rollout_id for s in spans} - self._known:
            await self._begin(rollout_id)
        await self._store.add_spans(spans)
        roots = [s for s in spans if s.parent_id is None]
        for root in roots:
            status = "failed" if root.status == "error" else "succeeded"
            await self._store.update_attempt(root.rollout_id, root.attempt, status, error=root.status_message)
            self._known.discard(root.rollout_id)
            self._begun.pop(root.rollout_id, None)
        if self._folder is not None and roots:
            await _write(self._store, self._folder, [root.rollout_id for root in roots])

    async def _begin(self, rollout_id: str) -> None:
        begun = self._begun.get(rollout_id) or Begun("", "agent", time.monotonic())
        new = new_rollout(begun.task, "collect", rollout_id, agent=begun.agent)
        await self._store.enqueue_rollouts([replace(new, created_at=moment(begun.began))])
        if await self._store.dequeue_rollout("massgen", run_id=new.run_id) is not None:
            await self._store.update_attempt(rollout_id, 1, "running")
        self._known.add(rollout_id)


async def _write(store: Store, folder: Path, rollout_ids: Sequence[str]) -> None:
    files = MassGenFiles(folder)
    for rollout_id in rollout_ids:
        files.add(await record(store, await store.get_rollout(rollout_id)))
    files.continue_index()
    files.write_index()


def _rollout_id(trace_id: str) -> str:
    rest = trace_id.removeprefix("trace_")
    head, _, span_id = rest.rpartition("_")
    return head if head and len(span_id) == 16 else rest


def _lost(why: str) -> None:
    log.warning("traces are lost: %s", why)
