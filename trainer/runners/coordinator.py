"""The run's side of an attempt: leases it with a way into the gateway, and builds and judges what comes back.

Invariant: an attempt that was leased ends in the store exactly once, with its calls, spans and rewards, or with the
reason it failed; the run hears of each rollout once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agl import semconv
from agl.agents.resources import resource_from_json
from agl.errors import AglError, AttemptOverError, RewardError, RolloutError, RolloutTimeoutError
from agl.mdp.builder import AttemptTrajectory, build_trajectory, require_trainable
from agl.mdp.selection import Selection
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.rewards.air import AIR, reward_spans
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.runners.protocol import LEASE_WAIT_SECONDS, Lease, Report, RolloutResult
from agl.trainer.store.base import (
    ATTEMPT_TERMINAL,
    ROLLOUT_TERMINAL,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Rollout,
    Store,
)

if TYPE_CHECKING:
    # What runs rollouts for a store needs no renderers and no tokenizers.
    from agl.trainer.gateway.gateway import Gateway

log = logging.getLogger("agl.runner")

WATCH_SECONDS = 0.5
_REST_SECONDS = 0.5
"""How long who asks in vain is kept from asking again."""
GRACE_SECONDS = 5.0
"""How long after its limit an attempt has to say by itself that it timed out."""


_LEFT = "its worker left before it began"


@dataclass(eq=False)
class _Open:
    """A lease that is out. Times are of the monotonic clock, which does not jump."""

    lease: Lease
    worker_id: str
    since: float
    beat: float
    lock: asyncio.Lock
    calls: list[Call] | None = None


class RunCoordinator:
    """A `Coordinator` over a store and, where calls are routed, a gateway. Lives on the run's event loop.

    Args:
        store: where rollouts come from and facts go. gateway: None routes nothing.
        selection: which agents are trained. rules: mode -> the trainer's sampling rules.
        resources: what rollouts are given; None = what the store holds under their `resources_id`, or its latest.
        model: the name that agents see for the policy. run_id: the run whose rollouts are leased; None = any.
        done: called with each result. air: the rules that reward tool outcomes, calls and handoffs, if any.
        rewarded: whether an attempt without a reward has failed.
        silent_seconds: how long a worker may be silent where a rollout's `unresponsive_seconds` does not say.
        given_up: called with the worker of each lease that ran past its limits; ends it, and returns the spans that it
            left, if they can be had.
    """

    def __init__(
        self,
        store: Store,
        gateway: Gateway | None = None,
        *,
        selection: Selection,
        rules: Callable[[str], SamplingRules] = lambda mode: SamplingRules(),
        resources: Mapping[str, Any] | None = None,
        model: str = "",
        run_id: str | None = None,
        done: Callable[[RolloutResult], None] = lambda result: None,
        air: AIR | None = None,
        rewarded: bool = True,
        capture_content: bool = True,
        silent_seconds: float | None = None,
        given_up: Callable[[Lease, str], Awaitable[Sequence[Span]]] | None = None,
    ) -> None:
        self.store, self.gateway, self.selection, self.rules = store, gateway, selection, rules
        self.resources, self.model, self.run_id, self.done = resources, model, run_id, done
        self.air, self.rewarded, self.capture_content = air, rewarded, capture_content
        self.silent_seconds, self.given_up = silent_seconds, given_up
        self._seeking: dict[asyncio.Task[Any], str] = {}
        self._open: dict[tuple[str, int], _Open] = {}
        self._dismissed: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._stopped = False
        self._heard = time.monotonic()

    def silent_for(self) -> float:
        """Seconds since a worker was last heard of; 0 while one waits for work."""
        return 0.0 if self._seeking else time.monotonic() - self._heard

    # -- workers ------------------------------------------------------------------------------------------------------
    async def lease(self, worker_id: str, wait: float = LEASE_WAIT_SECONDS) -> Lease | None:
        self._heard = time.monotonic()
        this = asyncio.current_task()
        assert this is not None
        if self._stopped or self._is_dismissed(worker_id):
            await asyncio.sleep(min(wait, _REST_SECONDS))
            return None
        self._seeking[this] = worker_id
        try:
            leased = await self.store.dequeue_rollout(worker_id, run_id=self.run_id, wait=wait)
        finally:
            self._seeking.pop(this, None)
        if leased is None:
            return None
        opening = asyncio.ensure_future(self.open(leased, worker_id))
        try:
            lease = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await self.abandon(await opening, _LEFT)
            raise
        if self._is_dismissed(worker_id):
            await self.abandon(lease, _LEFT)
            return None
        return lease

    async def open(self, leased: AttemptedRollout, worker_id: str) -> Lease:
        """The lease of an attempt that was taken from the store."""
        rollout, attempt = leased.rollout, leased.attempt.attempt
        now = time.monotonic()
        lease = Lease(
            leased, self.selection, await self._resources(rollout), capture_content=self.capture_content,
            model=self.model,
        )  # fmt: skip
        if self.gateway is not None:
            rules = self.rules(rollout.mode)
            access, key = self.gateway.open_attempt(
                rollout.rollout_id, attempt, selection=self.selection, seed=rollout.seed, rules=rules
            )
            sampling = {} if rules.temperature is None else {"temperature": rules.temperature}
            lease = replace(lease, gateway=self.gateway.base_url, url=access.url, key=key, sampling=sampling)
        self._open[lease.id] = _Open(lease, worker_id, now, now, asyncio.Lock())
        await self.store.update_attempt(rollout.rollout_id, attempt, "running")
        return lease

    async def find(self, rollout_id: str, attempt: int) -> Lease:
        """The lease of an attempt that is out, or was when this desk's server was restarted.

        Raises:
            StoreError: there is no such rollout.
        """
        if (opened := self._open.get((rollout_id, attempt))) is not None:
            return opened.lease
        rollout = await self.store.get_rollout(rollout_id)
        return Lease(AttemptedRollout(rollout, Attempt(rollout.rollout_id, attempt, "running")), self.selection)

    async def heartbeat(self, lease: Lease) -> bool:
        self._heard = time.monotonic()
        opened = self._open.get(lease.id)
        if opened is not None:
            opened.beat = time.monotonic()
        await self.store.heartbeat(*lease.id)
        if opened is not None or self.gateway is not None:
            return opened is not None
        rollout = await self.store.get_rollout(lease.id[0])
        return rollout.status not in ROLLOUT_TERMINAL and rollout.attempts == lease.attempt

    async def deliver(self, lease: Lease, spans: Sequence[Span]) -> None:
        opened = self._open.get(lease.id)
        if opened is not None:
            async with opened.lock:
                await self._calls(opened)
        await self.store.add_spans(spans)

    async def finish(self, lease: Lease, report: Report) -> None:
        self._heard = time.monotonic()
        opened = self._open.get(lease.id)
        if opened is None:
            if not await self._is_open(lease):
                return
            if self.gateway is not None:
                raise AttemptOverError(
                    "this attempt is not open here any more",
                    hint="the run that leased it was restarted, and has asked for the rollout again",
                    rollout=lease.rollout.rollout_id,
                    attempt=lease.attempt,
                )
            # The server of a store was restarted; all that its desk knew is in the store.
            opened = _Open(lease, "", 0.0, 0.0, asyncio.Lock())
        async with opened.lock:
            if self._open.get(lease.id) is opened or self.gateway is None:
                await self._finish(opened, report)
                self._open.pop(lease.id, None)

    async def abandon(self, lease: Lease, why: str) -> None:
        opened = self._open.get(lease.id)
        if opened is None:
            return
        async with opened.lock:
            if self._open.get(lease.id) is not opened:
                return
            await self._calls(opened)
            await self._move(opened, "failed", Report(error=_failed(lease, why), text=why), None)
            # Not before: a store that refused this may be asked again.
            self._open.pop(lease.id, None)

    def dismiss(self, worker_id: str) -> list[Lease]:
        """Lease nothing more to a worker that has ended, or to any of "<worker_id>/...".

        Returns:
            What they hold; the caller finishes that.
        """
        self._dismissed.add(worker_id)
        for seeking, who in list(self._seeking.items()):
            if worker_id in _lineage(who):
                seeking.cancel()
        return [o.lease for o in self._open.values() if worker_id in _lineage(o.worker_id)]

    def _is_dismissed(self, worker_id: str) -> bool:
        return not self._dismissed.isdisjoint(_lineage(worker_id))

    # -- the run ------------------------------------------------------------------------------------------------------
    async def close(self, lease: Lease) -> None:
        """Let go of a lease whose rollout the run itself ends."""
        if self._open.pop(lease.id, None) is not None and self.gateway is not None:
            await self.gateway.close_attempt(*lease.id)

    def watch(self) -> None:
        """From now on give up attempts that run past their limits, as workers elsewhere may have died."""
        self._watching = self._watching or asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        """Lease nothing more, stop watching and close every lease that is out. Idempotent."""
        self._stopped = True
        for seeking in list(self._seeking):
            seeking.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        for opened in list(self._open.values()):
            await self.close(opened.lease)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for opened in list(self._open.values()):
                error = _late(opened, self.silent_seconds)
                if error is not None and not opened.lock.locked():
                    try:
                        await self._give_up(opened, error)
                    except AglError as why:
                        log.warning("rollout %s attempt %d cannot be given up yet: %s", *opened.lease.id, why)

    async def _give_up(self, opened: _Open, error: RolloutError) -> None:
        async with opened.lock:
            if self._open.get(opened.lease.id) is not opened:
                return
            spans = () if self.given_up is None else await self.given_up(opened.lease, opened.worker_id)
            await self._calls(opened)
            await self.store.add_spans(spans)
            status: AttemptStatus = "timeout" if isinstance(error, RolloutTimeoutError) else "unresponsive"
            await self._move(opened, status, Report(spans, error, str(error)), None)
            self._open.pop(opened.lease.id, None)

    # -- an attempt's end ---------------------------------------------------------------------------------------------
    async def _finish(self, opened: _Open, report: Report) -> None:
        lease = opened.lease
        try:
            calls = await self._calls(opened)
        except AglError as lost:
            calls, report = [], replace(report, error=report.error or lost)
        await self.store.add_spans(report.spans)
        built = None
        if report.error is None:
            try:
                built = await self._built(lease, calls, report.spans)
            except AglError as refused:
                report = replace(report, error=refused)
        await self._move(opened, report.status, report, built)

    async def _move(
        self, opened: _Open, status: AttemptStatus, report: Report, built: AttemptTrajectory | None
    ) -> None:
        """Note in the store what an attempt came to, and tell the run; unless the store gave it up before."""
        lease = opened.lease
        try:
            after = await self.store.update_attempt(*lease.id, status, error=report.traceback)
        except AttemptOverError as over:
            after = await self.store.get_rollout(lease.id[0])
            report, built = replace(report, error=report.error or over), None
        self._ended(after, opened, report, built)

    def _ended(self, after: Rollout, opened: _Open, report: Report, built: AttemptTrajectory | None) -> None:
        rollout_id, attempt = opened.lease.id
        if after.status == "queuing":
            log.info("rollout %s attempt %d %s, trying again: %s", rollout_id, attempt, report.status, report.error)
        elif attempt == after.attempts and after.status in ROLLOUT_TERMINAL:
            self.done(RolloutResult(after, attempt, built, report.error))

    async def _calls(self, opened: _Open) -> list[Call]:
        if opened.calls is None:
            opened.calls = [] if self.gateway is None else await self.gateway.close_attempt(*opened.lease.id)
        return opened.calls

    async def _built(self, lease: Lease, calls: list[Call], spans: Sequence[Span]) -> AttemptTrajectory:
        rollout, attempt = lease.rollout, lease.attempt
        index = SpanIndex(calls, spans)
        trajectory = build_trajectory(rollout.rollout_id, attempt, rollout.group, index, self.selection)
        if self.gateway is not None:
            require_trainable(trajectory, self.selection)
        if self.air is not None and (credited := self.air.rewards(trajectory, index, self.selection)):
            trajectory = trajectory.with_rewards(credited)
            await self.store.add_spans(reward_spans(credited, index))
            if trajectory.unplaced and self.gateway is not None:
                names = ", ".join(sorted({r.name for r in trajectory.unplaced}))
                log.warning(
                    "rollout %s: no call known for %d AIR reward(s) (%s); they count for the whole rollout",
                    rollout.rollout_id,
                    len(trajectory.unplaced),
                    names,
                )
        if self.rewarded and trajectory.reward is None:
            raise RewardError(
                f"agent {_outermost(spans)!r} returned no reward and emitted none",
                hint="return a number, pass reward= to agl.wrap, or call agl.emit_reward",
                rollout=rollout.rollout_id,
                attempt=attempt,
            )
        return trajectory

    async def _resources(self, rollout: Rollout) -> Mapping[str, Any]:
        if self.resources is not None:
            return self.resources
        found = await self.store.get_resources(rollout.resources_id)
        if found is None:
            return {}
        return {name: resource_from_json(r) for name, r in found[1].items() if isinstance(r, Mapping) and "type" in r}

    async def _is_open(self, lease: Lease) -> bool:
        attempts = await self.store.query_attempts(lease.rollout.rollout_id)
        return any(a.attempt == lease.attempt and a.status not in ATTEMPT_TERMINAL for a in attempts)


def _lineage(worker_id: str) -> tuple[str, str]:
    """A worker and the pool that it is of."""
    return worker_id, worker_id.partition("/")[0]


def _outermost(spans: Sequence[Span]) -> str | None:
    return next((s.agent for s in spans if s.parent_id is None and s.operation == semconv.INVOKE_AGENT), None)


def _failed(lease: Lease, why: str) -> RolloutError:
    return RolloutError(why, rollout=lease.rollout.rollout_id, attempt=lease.attempt)


def _late(opened: _Open, silent_seconds: float | None) -> RolloutError | None:
    """Why an attempt is to be given up, if it is."""
    config, where = opened.lease.rollout.config, {"rollout": opened.lease.id[0], "attempt": opened.lease.id[1]}
    now = time.monotonic()
    if config.timeout_seconds is not None and now - opened.since > config.timeout_seconds + GRACE_SECONDS:
        return RolloutTimeoutError(
            f"the agent ran past its limit of {config.timeout_seconds:g} s and did not let itself be stopped",
            hint="raise Trainer(timeout=...), or find out what it waits for",
            **where,
        )
    silent = silent_seconds if config.unresponsive_seconds is None else config.unresponsive_seconds
    if silent is not None and now - opened.beat > silent:
        return RolloutError(
            f"its runner {opened.worker_id!r} has not been heard of for {now - opened.beat:.0f} s",
            hint="it died, or lost its connection; the rollout is run again elsewhere",
            **where,
        )
    return None
