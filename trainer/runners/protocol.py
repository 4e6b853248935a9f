"""What a run's coordinator and its workers exchange: a lease goes out, a report comes back."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agl.errors import RolloutTimeoutError, outlined
from agl.mdp.builder import AttemptTrajectory
from agl.mdp.selection import Selection
from agl.mdp.spans import Span
from agl.trainer.store.types import AttemptedRollout, AttemptStatus, Rollout

LEASE_WAIT_SECONDS = 20.0
"""How long one request for work may wait for it."""
HEARTBEAT_SECONDS = 5.0
"""How often a worker says that its attempts are alive."""


FAILURES = ("agent", "reward", "timeout", "infrastructure")
"""What an attempt can fail of: its agent, its reward function, its time limit, or what surrounds them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed.

    Attributes:
        rollout_id, attempt: identify the attempt.
        kind: one of `FAILURES`.
        message: what happened.
        place: the line of the user's code that raised, "file:line"; "" if it is not known.
        traceback: the error as the store has it.
    """

    rollout_id: str
    attempt: int
    kind: str
    message: str
    place: str = ""
    traceback: str = ""

    @property
    def of_user_code(self) -> bool:
        """Whether the user's own code failed."""
        return self.kind in ("agent", "reward")

    @property
    def gist(self) -> str:
        """The first and the last line of the message: a program's error begins and ends alike."""
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        return " ... ".join(dict.fromkeys(lines[:1] + lines[-1:]))


@dataclass(frozen=True, slots=True, eq=False)
class RolloutResult:
    """The result of a rollout after its last attempt.

    Attributes:
        rollout: as stored.
        attempt: the number of the last one, from 1.
        attempt_trajectory: trajectories and rewards of that attempt; None when it failed.
        error: why it failed; None when it succeeded.
        failures: of each attempt that failed, also where a later one succeeded.
    """

    rollout: Rollout
    attempt: int
    attempt_trajectory: AttemptTrajectory | None
    error: BaseException | None
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """One attempt to execute, and all that it needs.

    Attributes:
        attempted_rollout: the rollout and its attempt.
        selection: which agents are trained.
        resources: named values for the agent, in addition to the policy.
        gateway: base URL of the gateway; None when nothing is routed.
        port: of the gateway, if it is another one than the coordinator's.
        url: the attempt's URL below it, without the agent.
        key: valid for this attempt only.
        model: the policy's name.
        sampling: the trainer's sampling parameters that agents can see.
        capture_content: whether texts are recorded.
    """

    attempted_rollout: AttemptedRollout
    selection: Selection
    resources: Mapping[str, Any] = field(default_factory=dict)
    gateway: str | None = None
    port: int | None = None
    url: str = ""
    key: str | None = field(default=None, repr=False)
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    capture_content: bool = True

    @property
    def rollout(self) -> Rollout:
        return self.attempted_rollout.rollout

    @property
    def attempt(self) -> int:
        """The attempt's number, from 1."""
        return self.attempted_rollout.attempt.attempt

    @property
    def id(self) -> tuple[str, int]:
        """Rollout id and attempt."""
        return self.rollout.rollout_id, self.attempt


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The result of executing a lease.

    Attributes:
        spans: all spans of the attempt.
        error: why it failed; None if it did not.
        text: the error with its traceback, where `error` itself has none; of an attempt that did not fail, what the
            policy caused (`agl.mdp.faults`).
    """

    spans: Sequence[Span] = ()
    error: BaseException | None = None
    text: str | None = None

    @property
    def status(self) -> AttemptStatus:
        """The attempt's status."""
        if self.error is None:
            return "succeeded"
        return "timeout" if isinstance(self.error, RolloutTimeoutError) else "failed"

    def traceback(self, *, content: bool) -> str | None:
        """The error as text for the store; without `content`, where it was raised and its type alone."""
        if self.error is None or self.text:
            return self.text
        return "".join(traceback.format_exception(self.error)).strip() if content else outlined(self.error)


class Coordinator(Protocol):
    """Where workers get rollouts and report their results. Each method may be repeated after a failure."""

    async def lease(self, worker_id: str, wait: float = LEASE_WAIT_SECONDS) -> Lease | None:
        """The next rollout, waiting for it up to `wait` seconds; None if there was none."""
        ...

    async def heartbeat(self, lease: Lease) -> bool:
        """Report that the attempt is alive; False if it is no longer wanted."""
        ...

    async def deliver(self, lease: Lease, spans: Sequence[Span]) -> None:
        """End the attempt's calls and store its spans, before it is finished; for callers that read them first."""
        ...

    async def remember(self, lease: Lease, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What a search finds in the memory of the attempt's agent (`agl.agents.memory.search`): {"snapshot", "hits"},
        or {"error"}. None if the attempt is over."""
        ...

    async def finish(self, lease: Lease, report: Report) -> None:
        """End the attempt; a failed one is queued again where its rollout has attempts left.

        Raises:
            AttemptOverError: it was cancelled or given up; its result is not wanted.
        """
        ...

    async def abandon(self, lease: Lease, why: str) -> None:
        """Give up the lease unfinished; another worker may take the rollout."""
        ...


class Runner(Protocol):
    """Executes a run's rollouts; the run's side of workers in threads, processes or on other machines."""

    async def start(self) -> None:
        """Start the workers; a failure of theirs that is no rollout's is reported to the run."""
        ...

    async def stop(self) -> None:
        """End running attempts and the workers; bounded, idempotent."""
        ...
