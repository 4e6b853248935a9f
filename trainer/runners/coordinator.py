"""The run's side of an attempt: leases it with access to the gateway, then builds and checks its trajectory.

Invariant: an attempt that was leased ends in the store exactly once, with its calls, spans and rewards, or with the
reason it failed; the run gets the result of each rollout once.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agl import semconv
from agl.agents.prompts import PromptUse, replacements
from agl.agents.resources import resource_from_json
from agl.errors import (
    AglError,
    AttemptOverError,
    GatewayError,
    RewardError,
    RolloutError,
    RolloutTimeoutError,
)
from agl.mdp.builder import AttemptTrajectory, build_trajectory, require_trainable
from agl.mdp.faults import find_fault
from agl.mdp.order import number_after
from agl.mdp.selection import Selection
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.rewards.air import AIR, reward_spans
from agl.tracing.inferred import completed
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.http.auth import LEASE_HEADER
from agl.trainer.runners.attempt_failures import reported_failure
from agl.trainer.runners.lease_guard import LeaseGuard
from agl.trainer.runners.protocol import LEASE_WAIT_SECONDS, Failure, Lease, Report, RolloutResult
from agl.trainer.runners.repeats import Repeats
from agl.trainer.store.base import Store
from agl.trainer.store.lost_answers import mark_lost_answers
from agl.trainer.store.types import (
    ATTEMPT_TERMINAL,
    NOT_AGAIN,
    ROLLOUT_TERMINAL,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Rollout,
)

if TYPE_CHECKING:
    # A coordinator without a gateway needs no renderers and no tokenizers.
    from agl.trainer.gateway.gateway import Gateway

log = logging.getLogger("agl.runner")

CHECK_SECONDS = 0.5
"""How often open leases are checked for limits."""
_REFUSAL_SECONDS = 0.5
"""How long the answer to a worker that gets no lease is delayed."""
GRACE_SECONDS = 5.0
"""How long after its limit an attempt may take to report that it timed out."""
GIVE_BACK_SECONDS = 2.0
"""How long a coordinator that ends tries to give back what nobody has received."""


@dataclass(eq=False)
class _OpenLease:
    """A lease that a worker holds. `started` and `last_heartbeat` are times of the monotonic clock.

    `request_id`: of the worker's request at the store. `begun`: whether a heartbeat has come. `lost`: why its calls are
    unknown, if they are. `delivered`: spans that came before its report.
    """

    lease: Lease
    worker_id: str
    started: float
    last_heartbeat: float
    lock: asyncio.Lock
    request_id: str = ""
    begun: bool = False
    calls: list[Call] | None = None
    lost: GatewayError | None = None
    delivered: dict[str, Span] = field(default_factory=dict)


class RunCoordinator:
    """A `Coordinator` over a store and, where calls are routed, a gateway. Lives on the run's event loop.

    Args:
        store: where rollouts come from and results are recorded.
        gateway: None routes nothing.
        selection: which agents are trained.
        rules: mode -> the trainer's sampling rules.
        resources: for every rollout, with those that the store holds under its `resources_id` in their place or in
            addition; None = those of the store alone, under that id or the latest.
        model: the name that agents see for the policy.
        run_id: the run whose rollouts are leased; None = any.
        on_result: called with each result.
        air: the rules that reward tool outcomes, calls and handoffs, if any.
        rewarded: whether an attempt without a reward has failed.
        reward_range: outside of which it has failed, too.
        silent_seconds: how long a worker may be silent, for rollouts without `unresponsive_seconds`.
        guard: of workers that other people start; None trusts every worker.
        end_worker: called with each lease that is past its limits and its worker; ends the worker, and returns the
            attempt's spans if it can.
        memory: answers a search of a rollout in its agent's memory; None without one.
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
        on_result: Callable[[RolloutResult], None] = lambda result: None,
        air: AIR | None = None,
        rewarded: bool = True,
        reward_range: tuple[float, float] | None = None,
        capture_content: bool = True,
        silent_seconds: float | None = None,
        guard: LeaseGuard | None = None,
        end_worker: Callable[[Lease, str], Awaitable[Sequence[Span]]] | None = None,
        memory: Callable[[Rollout, Mapping[str, Any]], Awaitable[dict[str, Any]]] | None = None,
    ) -> None:
        self.store = store
        self.gateway = gateway
        self.selection = selection
        self.rules = rules
        self.resources = resources
        self.model = model
        self.run_id = run_id
        self.on_result = on_result
        self.air = air
        self.rewarded = rewarded
        self.capture_content = capture_content
        self.reward_range = reward_range or (-math.inf, math.inf)
        self.silent_seconds = silent_seconds
        self.guard = guard
        self.end_worker = end_worker
        self.memory = memory
        self._prompt_use = PromptUse(resources) if resources and replacements(resources) else None
        self._repeats = Repeats()
        self._failures: dict[str, list[Failure]] = defaultdict(list)
        self._lease_tasks: dict[asyncio.Task[Any], str] = {}
        self._give_backs: set[asyncio.Task[None]] = set()
        self._open: dict[tuple[str, int], _OpenLease] = {}
        self._lost: dict[str, float] = {}
        self._dismissed: set[str] = set()
        self._watch_task: asyncio.Task[None] | None = None
        self._stopped = False
        self._last_heard = time.monotonic()

    def silent_for(self) -> float:
        """Seconds since any worker's last request; 0 while one waits for work."""
        return 0.0 if self._lease_tasks else time.monotonic() - self._last_heard

    # -- workers ------------------------------------------------------------------------------------------------------
    async def lease(self, worker_id: str, wait: float = LEASE_WAIT_SECONDS) -> Lease | None:
        self._last_heard = time.monotonic()
        this = asyncio.current_task()
        assert this is not None
        if self._stopped or self._is_dismissed(worker_id):
            await asyncio.sleep(min(wait, _REFUSAL_SECONDS))
            return None
        if (pause := self._pause(worker_id)) > 0:
            await asyncio.sleep(min(wait, pause))
            return None
        request_id = uuid.uuid4().hex
        self._lease_tasks[this] = worker_id
        try:
            attempted_rollout = await self.store.dequeue_rollout(
                worker_id, run_id=self.run_id, wait=wait, request_id=request_id
            )
        except BaseException:
            # The answer was lost, perhaps that of a lease. The rollouts of a run that ends are cancelled.
            if not self._stopped:
                self._give_back(request_id)
            raise
        finally:
            self._lease_tasks.pop(this, None)
        if attempted_rollout is None:
            return None
        rollout_id = attempted_rollout.rollout.rollout_id
        if not self._is_proven(worker_id) and self._is_kept(rollout_id):
            self._give_back(request_id)
            return None
        self._lost.pop(rollout_id, None)
        opening = asyncio.ensure_future(self.open(attempted_rollout, worker_id, request_id))
        try:
            lease = await asyncio.shield(opening)
        except BaseException:
            self._give_back(request_id, opening)
            raise
        if self._is_dismissed(worker_id):
            self._give_back(request_id, opening)
            return None
        return lease

    async def give_back(self, lease: Lease) -> None:
        """Undo a lease that its worker has not received; it costs its rollout no attempt."""
        entry = self._open.get(lease.id)
        if entry is not None:
            await self.close(lease)
            self._give_back(entry.request_id)

    def _give_back(self, request_id: str, opening: asyncio.Task[Lease] | None = None) -> None:
        """Begin to undo the lease of a request that no worker gets an answer to, if there is one.

        Args:
            opening: what opens its attempt.
        """
        task = asyncio.ensure_future(self._undo(request_id, opening))
        self._give_backs.add(task)
        task.add_done_callback(self._give_backs.discard)

    async def _undo(self, request_id: str, opening: asyncio.Task[Lease] | None) -> None:
        if opening is not None:
            await asyncio.wait((opening,))
            if not opening.cancelled() and opening.exception() is None:
                await self.close(opening.result())
        warned = False
        while True:
            try:
                await self.store.give_back(request_id, begun=True)
                return
            except AglError as error:
                if not warned:
                    warned = True
                    log.warning("a rollout whose lease failed cannot be given back yet: %s", error)
            await asyncio.sleep(CHECK_SECONDS)

    def _pause(self, worker_id: str) -> float:
        """Seconds for which a worker gets no lease: it lost one, or it has or awaits one without having reported yet,
        or rollouts that others lost are kept for proven workers."""
        if self.guard is None or self._is_proven(worker_id):
            return 0.0
        refused = any(worker_id == busy for busy in self._busy_workers()) or any(map(self._is_kept, self._lost))
        return max(self.guard.pause(worker_id), _REFUSAL_SECONDS if refused else 0.0)

    def _is_proven(self, worker_id: str) -> bool:
        return self.guard is None or self.guard.is_proven(worker_id)

    def _busy_workers(self) -> Iterator[str]:
        """The workers that wait for a lease or hold one."""
        yield from self._lease_tasks.values()
        yield from (entry.worker_id for entry in self._open.values())

    def _is_kept(self, rollout_id: str) -> bool:
        """Whether a rollout was taken from a worker, and is kept for those that report, as long as there are some.

        Otherwise workers that only take could use up its attempts.
        """
        guard = self.guard
        lost_at = self._lost.get(rollout_id)
        return (
            guard is not None
            and lost_at is not None
            and time.monotonic() - lost_at < guard.patience
            and guard.is_one_proven(self._busy_workers())
        )

    async def open(self, attempted_rollout: AttemptedRollout, worker_id: str, request_id: str = "") -> Lease:
        """The lease of an attempt that was dequeued from the store by this request. If that fails, nothing is open."""
        rollout = attempted_rollout.rollout
        attempt = attempted_rollout.attempt.attempt
        now = time.monotonic()
        resources = await self._resources(rollout)
        lease = Lease(
            attempted_rollout,
            self.selection,
            resources,
            capture_content=self.capture_content,
            model=self.model,
        )
        if self.gateway is not None:
            rules = self.rules(rollout.mode)
            access, key = self.gateway.open_attempt(
                rollout.rollout_id,
                attempt,
                selection=self.selection,
                seed=rollout.seed,
                rules=rules,
                system_prompts=replacements(resources),
            )
            sampling = {} if rules.temperature is None else {"temperature": rules.temperature}
            if access.admitted is not None:
                # If that process has died, the attempt's end will say so.
                await asyncio.gather(access.admitted, return_exceptions=True)
            lease = replace(
                lease, gateway=access.base_url, port=access.port, url=access.url, key=key, sampling=sampling
            )
        self._open[lease.id] = _OpenLease(lease, worker_id, now, now, asyncio.Lock(), request_id)
        try:
            await self.store.update_attempt(rollout.rollout_id, attempt, "running")
        except BaseException:
            await self.close(lease)
            raise
        return lease

    async def find(self, rollout_id: str, attempt: int, secrets: Sequence[str]) -> Lease:
        """The lease of a running attempt, also of one that was leased before this server was restarted.

        Args:
            secrets: those that the sender shows; whoever has not leased the attempt may not report on it.

        Raises:
            AttemptOverError: none of them is the lease's, or there is no such attempt.
        """
        entry = self._open.get((rollout_id, attempt))
        if entry is not None:
            own = (entry.lease.attempted_rollout.secret or "").encode()
            leased = any([own != b"" and hmac.compare_digest(own, secret.encode()) for secret in secrets])
        else:
            leased = await self.store.is_leased_with(rollout_id, attempt, secrets)
        if not leased:
            raise AttemptOverError(
                "this attempt is not leased to the sender of this request",
                hint=f"a lease has a secret, which every report on it shows in the header {LEASE_HEADER}",
                rollout=rollout_id,
                attempt=attempt,
            )
        if entry is not None:
            return entry.lease
        rollout = await self.store.get_rollout(rollout_id)
        return Lease(AttemptedRollout(rollout, Attempt(rollout.rollout_id, attempt, "running")), self.selection)

    async def heartbeat(self, lease: Lease) -> bool:
        self._last_heard = time.monotonic()
        entry = self._open.get(lease.id)
        if entry is not None:
            entry.last_heartbeat = time.monotonic()
            entry.begun = True
        await self.store.heartbeat(*lease.id)
        if entry is not None or self.gateway is not None:
            return entry is not None
        rollout = await self.store.get_rollout(lease.id[0])
        return rollout.status not in ROLLOUT_TERMINAL and rollout.attempts == lease.attempt

    async def deliver(self, lease: Lease, spans: Sequence[Span]) -> None:
        entry = self._open.get(lease.id)
        if entry is not None:
            async with entry.lock:
                await self._calls(entry)
                entry.delivered |= {span.span_id: span for span in spans}
        await self.store.add_spans(spans)

    async def remember(self, lease: Lease, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.memory is None:
            return {"error": "this run has no memory"}
        return await self.memory(lease.rollout, request)

    async def finish(self, lease: Lease, report: Report) -> None:
        self._last_heard = time.monotonic()
        entry = self._open.get(lease.id)
        if entry is None:
            attempts = await self.store.query_attempts(lease.rollout.rollout_id)
            if not any(a.attempt == lease.attempt and a.status not in ATTEMPT_TERMINAL for a in attempts):
                return
            if self.gateway is not None:
                raise AttemptOverError(
                    "this attempt is no longer open here",
                    hint="the run that leased it was restarted, and has enqueued the rollout again",
                    rollout=lease.rollout.rollout_id,
                    attempt=lease.attempt,
                )
            # The server of a store was restarted; all that its coordinator knew is in the store.
            entry = _OpenLease(lease, "", 0.0, 0.0, asyncio.Lock())
            entry.delivered = {span.span_id: span for span in await self.store.query_spans(*lease.id)}
        async with entry.lock:
            if self._open.get(lease.id) is entry or self.gateway is None:
                await self._finish(entry, report)
                self._open.pop(lease.id, None)
                if self.guard is not None and entry.worker_id:
                    self.guard.reported(entry.worker_id, time.monotonic() - entry.started)

    async def abandon(self, lease: Lease, why: str) -> None:
        entry = self._open.get(lease.id)
        if entry is None:
            return
        async with entry.lock:
            if self._open.get(lease.id) is not entry:
                return
            await self._calls(entry)
            error = RolloutError(why, rollout=lease.rollout.rollout_id, attempt=lease.attempt)
            await self._end_attempt(entry, "failed", Report(error=error, text=why), None)
            # Not before: the caller may try again after the store refused this.
            self._open.pop(lease.id, None)

    def dismiss(self, worker_id: str) -> list[Lease]:
        """Lease nothing more to a worker that has ended, or to any worker named "<worker_id>/...".

        Returns:
            The leases that they hold; the caller finishes these.
        """
        self._dismissed.add(worker_id)
        for task, worker in list(self._lease_tasks.items()):
            if worker_id in _lineage(worker):
                task.cancel()
        return [e.lease for e in self._open.values() if worker_id in _lineage(e.worker_id)]

    def _is_dismissed(self, worker_id: str) -> bool:
        return not self._dismissed.isdisjoint(_lineage(worker_id))

    # -- the run ------------------------------------------------------------------------------------------------------
    async def close(self, lease: Lease) -> None:
        """Close a lease whose rollout the run itself ends."""
        entry = self._open.pop(lease.id, None)
        if entry is not None:
            await self._calls(entry)

    def watch(self) -> None:
        """Begin to give up attempts past their limits; workers in other processes may have died."""
        self._watch_task = self._watch_task or asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        """Lease nothing more, stop watching and close every open lease. Idempotent."""
        self._stopped = True
        for task in list(self._lease_tasks):
            task.cancel()
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
            self._watch_task = None
        if self._give_backs:
            _, unfinished = await asyncio.wait(self._give_backs, timeout=GIVE_BACK_SECONDS)
            for task in unfinished:
                task.cancel()
        for entry in list(self._open.values()):
            await self.close(entry.lease)
        if self._prompt_use is not None and self._prompt_use.counted:
            for line in self._prompt_use.unused():
                log.warning("%s", line)
            self._prompt_use = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            overdue = [(entry, _overdue(entry, self.silent_seconds, self.guard)) for entry in self._open.values()]
            for entry, error in [*overdue, *self._stalled()]:
                if error is not None and not entry.lock.locked():
                    try:
                        await self._give_up(entry, error)
                    except AglError as failure:
                        log.warning("rollout %s attempt %d cannot be given up yet: %s", *entry.lease.id, failure)

    def _stalled(self) -> Iterator[tuple[_OpenLease, RolloutError]]:
        """Attempts to take from workers that have never reported, oldest first, with the reason: at most as many as
        proven workers wait for work."""
        guard = self.guard
        if guard is None or any(map(self._is_kept, self._lost)):
            return
        now = time.monotonic()
        waiting = sum(map(guard.is_proven, self._lease_tasks.values()))
        slow = (
            entry
            for entry in self._open.values()
            if now - entry.started > guard.patience
            and entry.lease.attempt < entry.lease.rollout.config.max_attempts
            and not guard.is_proven(entry.worker_id)
        )
        for entry in sorted(slow, key=lambda entry: entry.started)[:waiting]:
            yield (
                entry,
                RolloutError(
                    f"its runner {entry.worker_id!r} has never reported, has had it for {now - entry.started:.0f} s, "
                    "and another one waits",
                    hint="another runner runs the rollout again",
                    rollout=entry.lease.id[0],
                    attempt=entry.lease.attempt,
                ),
            )

    async def _give_up(self, entry: _OpenLease, error: RolloutError) -> None:
        async with entry.lock:
            if self._open.get(entry.lease.id) is not entry:
                return
            if self.guard is not None:
                self.guard.lost(entry.worker_id)
                self._lost[entry.lease.id[0]] = time.monotonic()
            spans = () if self.end_worker is None else await self.end_worker(entry.lease, entry.worker_id)
            await self._calls(entry)
            await self.store.add_spans(spans)
            status: AttemptStatus = "timeout" if isinstance(error, RolloutTimeoutError) else "unresponsive"
            await self._end_attempt(entry, status, Report(spans, error, str(error)), None)
            self._open.pop(entry.lease.id, None)

    # -- an attempt's end ---------------------------------------------------------------------------------------------
    async def _finish(self, entry: _OpenLease, report: Report) -> None:
        lease = entry.lease
        reported = {span.span_id: span for span in report.spans}
        report = replace(report, spans=tuple({**entry.delivered, **reported}.values()))
        try:
            calls = await mark_lost_answers(self.store, await self._calls(entry), report.spans)
        except AglError as error:
            calls = []
            report = replace(report, error=report.error or error)
        if entry.lost is not None:
            # What the agent saw is a connection that broke.
            report = replace(report, error=entry.lost, text=None)
        # The leases that follow know the names of this attempt's agents.
        self.selection = self.selection.knowing([*(s.agent for s in report.spans), *(call.agent for call in calls)])
        place = next((p for s in report.spans if (p := s.attributes.get(semconv.AGENT_ERROR_PLACE))), None)
        await self.store.add_spans(report.spans)
        self._count_prompts(report.spans, calls)
        report = await self._with_fault(calls, report)
        trajectory = None
        if report.error is None:
            try:
                trajectory = await self._trajectory(lease, calls, report.spans)
            except AglError as error:
                report = replace(report, error=error, text=None)
                place = "its result" if isinstance(error, RewardError) else None
        why = self._repeats.futile(lease.rollout, lease.attempt, place, report.error)
        if why and entry.lost is None:
            report = replace(report, text=f"{self._text(report)}\n{NOT_AGAIN}{why}")
            last = replace(lease.rollout.config, max_attempts=lease.attempt)
            await self.store.update_rollout(lease.rollout.rollout_id, {"config": last})
        await self._end_attempt(entry, report.status, report, trajectory)

    async def _with_fault(self, calls: Sequence[Call], report: Report) -> Report:
        """The report of an attempt that a policy has ended is no failure's, and has a span that says so."""
        if not any(semconv.AGENT_ERROR in s.attributes for s in report.spans):
            return report
        index = SpanIndex(calls, report.spans)
        fault = find_fault(index)
        # Where the agent's exception did not leave the attempt, an error is that of a hook.
        if fault is None or index.root is None or (report.error is not None and index.root.status != "error"):
            return report
        span = fault.span(index.root, number_after(report.spans))
        await self.store.add_spans([span])
        lines = [x for x in (self._text(report) or "").splitlines() if not x.lstrip().startswith("->")]
        return Report((*report.spans, span), None, "\n".join([*lines, str(fault)]))

    def _count_prompts(self, spans: Sequence[Span], calls: Sequence[Call]) -> None:
        """Count which system prompts were replaced; the first time that one did not fit, say so."""
        if self._prompt_use is not None:
            known = set(self._prompt_use.left)
            self._prompt_use.add(completed(spans, calls))
            if self._prompt_use.left.keys() - known:
                for line in self._prompt_use.unused(of_seen_agents=True):
                    log.warning("%s", line)

    async def _end_attempt(
        self, entry: _OpenLease, status: AttemptStatus, report: Report, trajectory: AttemptTrajectory | None
    ) -> None:
        """Record an attempt's end in the store, and pass its rollout's result to the run."""
        rollout_id, attempt = entry.lease.id
        try:
            rollout = await self.store.update_attempt(rollout_id, attempt, status, error=self._text(report))
        except AttemptOverError as error:
            # The store gave the attempt up before.
            rollout = await self.store.get_rollout(rollout_id)
            report = replace(report, error=report.error or error)
            trajectory = None
        if report.error is not None:
            failure = reported_failure(entry.lease, report, content=self.capture_content)
            self._failures[rollout_id].append(failure)
        if rollout.status == "queuing":
            log.info("rollout %s attempt %d %s, trying again: %s", rollout_id, attempt, report.status, report.error)
        elif attempt == rollout.attempts and rollout.status in ROLLOUT_TERMINAL:
            self._lost.pop(rollout_id, None)
            failures = tuple(self._failures.pop(rollout_id, ()))
            self.on_result(RolloutResult(rollout, attempt, trajectory, report.error, failures))

    def _text(self, report: Report) -> str | None:
        return report.traceback(content=self.capture_content)

    async def _calls(self, entry: _OpenLease) -> list[Call]:
        if entry.calls is None:
            try:
                entry.calls = [] if self.gateway is None else await self.gateway.close_attempt(*entry.lease.id)
            except GatewayError as error:
                entry.calls = []
                entry.lost = error
        return entry.calls

    async def _trajectory(self, lease: Lease, calls: list[Call], spans: Sequence[Span]) -> AttemptTrajectory:
        rollout = lease.rollout
        attempt = lease.attempt
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
        if self.rewarded and trajectory.reward is None and trajectory.fault is None:
            outermost = (s.agent for s in spans if s.parent_id is None and s.operation == semconv.INVOKE_AGENT)
            raise RewardError(
                f"agent {next(outermost, None)!r} returned no reward and emitted none",
                hint="return a number, pass reward= to agl.wrap, or call agl.emit_reward",
                rollout=rollout.rollout_id,
                attempt=attempt,
            )
        low, high = self.reward_range
        if trajectory.reward is not None and not low <= trajectory.reward <= high:
            parts = ", ".join(f"{r.name} {r.value:g} ({r.source})" for r, _ in trajectory.credited if r.primary)
            raise RewardError(
                f"its reward {trajectory.reward:g} lies outside of reward_range ({low:g}, {high:g}): {parts}",
                hint="mend the reward, or widen Trainer(reward_range=...)",
                rollout=rollout.rollout_id,
                attempt=attempt,
            )
        return trajectory

    async def _resources(self, rollout: Rollout) -> Mapping[str, Any]:
        own = self.resources or {}
        if self.resources is not None and rollout.resources_id is None:
            return own
        stored = await self.store.get_resources(rollout.resources_id)
        if stored is None:
            return own
        return {
            **own,
            **{name: resource_from_json(r) for name, r in stored[1].items() if isinstance(r, Mapping) and "type" in r},
        }


def _lineage(worker_id: str) -> tuple[str, str]:
    """A worker and its pool."""
    return worker_id, worker_id.partition("/")[0]


def _overdue(entry: _OpenLease, silent_seconds: float | None, guard: LeaseGuard | None) -> RolloutError | None:
    """Why an attempt is to be given up, if it is."""
    config = entry.lease.rollout.config
    where = {"rollout": entry.lease.id[0], "attempt": entry.lease.id[1]}
    now = time.monotonic()
    if config.timeout_seconds is not None and now - entry.started > config.timeout_seconds + GRACE_SECONDS:
        return RolloutTimeoutError(
            f"the agent ran past its limit of {config.timeout_seconds:g} s and could not be stopped",
            hint="raise Trainer(timeout=...), or find out what it waits for",
            **where,
        )
    silent = silent_seconds if config.unresponsive_seconds is None else config.unresponsive_seconds
    if silent is not None and guard is not None and not entry.begun:
        silent = min(silent, guard.first_heartbeat)
    if silent is not None and now - entry.last_heartbeat > silent:
        return RolloutError(
            f"its runner {entry.worker_id!r} has not been heard of for {now - entry.last_heartbeat:.0f} s",
            hint="it died or lost its connection; another runner runs the rollout again",
            **where,
        )
    return None
