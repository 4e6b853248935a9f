"""0.3's execution strategies: where a trainer's runners are."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from agl.options import reject_unknown
from agl_agentlightning.components import SpecValueError
from agl_agentlightning.lightning_store import LightningStore
from agl_agentlightning.utils import ExecutionEvent, MultiprocessingEvent, ThreadingEvent

__all__ = [
    "ClientServerExecutionStrategy",
    "ExecutionEvent",
    "ExecutionStrategy",
    "MultiprocessingEvent",
    "SharedMemoryExecutionStrategy",
    "ThreadingEvent",
]

Role = Literal["algorithm", "runner", "both"]
PORT = 4747


AlgorithmBundle = Callable[[LightningStore, ExecutionEvent], Awaitable[None]]
RunnerBundle = Callable[[LightningStore, int, ExecutionEvent], Awaitable[None]]


class ExecutionStrategy:
    """Base class for a strategy of one's own: `Trainer.fit` calls its `execute`, which decides where what runs.

    An algorithm that trains a model needs one of the strategies that are here.
    """

    n_runners: int = 1

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Run `algorithm(store, event)` and, as often as there are to be runners, `runner(store, worker_id, event)`,
        which ends when the event is set."""
        raise NotImplementedError(f"{type(self).__name__} does not override execute(algorithm, runner, store)")


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Runners in this process: the default.

    Args:
        n_runners: rollouts at once. main_thread, managed_store, **timeouts: without effect.
    """

    def __init__(
        self, n_runners: int = 1, main_thread: str = "runner", managed_store: bool | None = None, **timeouts: Any
    ) -> None:
        reject_unknown(timeouts, ("join_timeout", "graceful_delay", "poll_interval"), type(self).__name__)
        self.n_runners = n_runners
        self.main_thread = main_thread
        self.managed_store = _managed(managed_store)


class ClientServerExecutionStrategy(ExecutionStrategy):
    """Runners in other processes, which reach the algorithm over HTTP.

    The same program runs on both sides: with the role "algorithm" `fit` trains, and its gateway listens at
    `server_port`; with "runner" it executes rollouts for the trainer at `server_host`, until Ctrl-C; "both" starts
    processes of its own. Over a network, both sides need AGL_RUNNER_KEY.

    Args:
        role: AGL_CURRENT_ROLE if None, else "both".
        server_host, server_port: AGL_SERVER_HOST, AGL_SERVER_PORT if None, else port 4747 of this machine.
        n_runners: rollouts at once, of each runner. main_process, managed_store, **timeouts: without effect.

    Raises:
        ValueError: another role.
    """

    def __init__(
        self,
        role: Role | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        main_process: Literal["algorithm", "runner"] = "algorithm",
        managed_store: bool | None = None,
        **timeouts: Any,
    ) -> None:
        reject_unknown(timeouts, ("graceful_timeout", "terminate_timeout", "allowed_exit_codes"), type(self).__name__)
        self.role: Any = role or os.environ.get("AGL_CURRENT_ROLE") or "both"
        if self.role not in ("algorithm", "runner", "both"):
            raise SpecValueError(f"role={self.role!r}", hint="it is algorithm, runner or both")
        self.server_host = server_host or os.environ.get("AGL_SERVER_HOST") or "localhost"
        self.server_port = int(server_port or os.environ.get("AGL_SERVER_PORT") or PORT)
        self.n_runners = n_runners
        self.main_process = main_process
        self.managed_store = _managed(managed_store)

    @property
    def url(self) -> str:
        """Where runners reach the trainer."""
        return f"http://{self.server_host}:{self.server_port}"


STRATEGIES = {
    "shm": "agentlightning.execution.SharedMemoryExecutionStrategy",
    "cs": "agentlightning.execution.ClientServerExecutionStrategy",
}


def _managed(value: bool | None) -> bool:
    if value is not None:
        return value
    return os.environ.get("AGL_MANAGED_STORE", "1").strip().lower() not in ("0", "false", "no", "off")
