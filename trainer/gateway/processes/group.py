"""A gateway in several processes. Each attempt belongs to one of them, by its URL.

Invariant: engines and the store are used by this process alone. A call is in the store before its attempt is closed;
when a gateway process dies, its attempts end with an error that names it, and the other processes continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agl.errors import AglError, ConfigError, GatewayError
from agl.mdp.selection import Selection
from agl.mdp.types import Call
from agl.tracing.system_prompts import SystemPrompts
from agl.trainer.engines.base import Completion, Engine, Request, holds_to_grammars
from agl.trainer.gateway.access import Access, SamplingRules
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.sessions import Turn
from agl.trainer.http.limits import Limits
from agl.trainer.processes.child import Child
from agl.trainer.processes.environment import child_environment
from agl.trainer.processes.peer import Emit, Peer
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.store.base import Store

log = logging.getLogger("agl.gateway")

START_SECONDS = 120.0
_EXIT_SECONDS = 5.0


class GatewayProcesses(Gateway):
    """A `Gateway` in `n` processes; `start` and `stop` begin and end them.

    Args:
        store, capture_content, hold_timeout: as of `Gateway`.
        n: how many processes, at least 1.
        on_failure: called with the error when the last process has died.
    """

    def __init__(
        self,
        store: Store,
        n: int,
        *,
        capture_content: bool = True,
        hold_timeout: float = 30.0,
        on_failure: Callable[[AglError], None] = lambda error: None,
    ) -> None:
        super().__init__(store, capture_content=capture_content, hold_timeout=hold_timeout)
        self.n = n
        self.on_failure = on_failure
        self._processes: list[_Process] = []
        self._renderings: dict[str, bytes] = {}
        self._attempts: dict[tuple[str, int], tuple[_Process, Access, dict[str, Turn]]] = {}

    async def start(self, *, host: str = "127.0.0.1", port: int = 0, limits: Limits | None = None) -> None:
        """Start the processes, which serve the policies that were registered.

        Args:
            host: address to bind.
            port: the first of `n` in a row; 0 takes free ones.
            limits: what clients may do.

        Raises:
            GatewayError: a process did not start, or cannot listen.
            ConfigError: a rendering cannot be sent to it.
        """
        limits = limits or Limits.of_environment()
        self._processes = [_Process(i, self._add_calls, self._generate, self._on_death) for i in range(self.n)]
        options = (limits, self.capture_content, self.hold_timeout)
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(
                    *(p.start(host, port + i if port else 0, *options) for i, p in enumerate(self._processes))
                )
                await asyncio.gather(*(self._serve(p, name) for p in self._processes for name in self._policies))
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise GatewayError(
                    f"the gateway's processes were not ready after {START_SECONDS:g} s", hint="is the machine busy?"
                ) from None
            raise

    async def stop(self) -> None:
        """End the processes. Idempotent."""
        processes = self._processes
        self._processes = []
        await asyncio.gather(*(process.stop() for process in processes))

    @property
    def pids(self) -> list[int]:
        """Process ids of those that live."""
        return [process.pid for process in self._living()]

    # -- policies -------------------------------------------------------------------------------------------------
    def serve(self, name: str, engine: Engine, rendering: Rendering, stop_token_ids: Sequence[int] = ()) -> None:
        try:
            self._renderings[name] = pickle.dumps(rendering)
        except Exception as error:
            raise ConfigError(
                f"the renderer of policy {name!r} cannot be sent to another process: {error}", hint="use gateways=1"
            ) from error
        super().serve(name, engine, rendering, stop_token_ids)
        for process in self._living():
            # In order: what is sent later finds it served.
            self._serve(process, name)

    def _serve(self, process: _Process, name: str) -> Awaitable[None]:
        served = self.served(name)
        facts = (served.stop_token_ids, served.engine.max_context, holds_to_grammars(served.engine))
        return process.peer.call("serve", name, self._renderings[name], *facts)

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        processes = self._living()
        try:
            held = await asyncio.gather(*(p.peer.call("hold") for p in processes), return_exceptions=True)
            for process, error in zip(processes, held, strict=True):
                if isinstance(error, BaseException) and process.failure is None:
                    raise error
            yield
        finally:
            released = [process.peer.call("release") for process in processes]
            await asyncio.gather(*released, return_exceptions=True)

    # -- attempts -------------------------------------------------------------------------------------------------
    def open_attempt(
        self,
        rollout_id: str,
        attempt: int,
        *,
        selection: Selection,
        seed: int = 0,
        rules: SamplingRules | None = None,
        system_prompts: SystemPrompts | None = None,
    ) -> tuple[Access, str]:
        living = self._living()
        if not living:
            failures = [process.failure for process in self._processes if process.failure is not None]
            unstarted = GatewayError("the gateway is not listening", hint="start it with GatewayProcesses.start()")
            raise failures[-1] if failures else unstarted
        counts = [sum(of is process for of, _, _ in self._attempts.values()) for process in living]
        process = living[counts.index(min(counts))]
        rules = rules or SamplingRules()
        # This process admits none of its requests.
        access, key = Access.opened(rollout_id, attempt, selection, seed, rules, process.url, system_prompts)
        access.port = process.port
        access.admitted = process.peer.call("open", access.for_process())
        self._attempts[rollout_id, attempt] = process, access, {}
        return access, key

    async def close_attempt(self, rollout_id: str, attempt: int) -> list[Call]:
        """As of `Gateway`.

        Raises:
            StoreError: a call could not be stored.
            GatewayError: the attempt's process has died.
        """
        if (rollout_id, attempt) not in self._attempts:
            return []
        process, access, _ = self._attempts[rollout_id, attempt]
        try:
            await process.peer.call("close", rollout_id, attempt)
        except AglError:
            if process.failure is None:
                raise
            raise GatewayError(
                process.failure.message, hint=process.failure.hint, rollout=rollout_id, attempt=attempt
            ) from None
        finally:
            await asyncio.gather(*access.writes, return_exceptions=True)
            self._attempts.pop((rollout_id, attempt), None)
        return sorted(access.calls, key=lambda c: (c.index, c.id))

    def cancel_requests(self, cause: RequestError) -> None:
        for process in self._living():
            process.peer.call("cancel", cause.status, cause.message, cause.code)

    # -- the processes' side --------------------------------------------------------------------------------------
    def _living(self) -> list[_Process]:
        return [process for process in self._processes if process.failure is None]

    async def _add_calls(self, emit: Emit, calls: Sequence[tuple[Call, int]]) -> None:
        for sent, shared in calls:
            _, access, turns = self._attempts[sent.rollout_id, sent.attempt]
            call = sent
            buffer = None
            if shared:
                before = turns[sent.parent_id or ""]
                whole = np.concatenate([before.prompt_ids, before.response_ids, sent.prompt_ids])
                buffer, prompt_ids = before.shared(whole)
                call = replace(sent, prompt_ids=prompt_ids)
            turns[call.id] = Turn(call.id, call.prompt_ids, call.response_ids, "", buffer)
            access.calls.append(call)
            write = asyncio.ensure_future(self.store.add_calls([call]))
            access.writes.append(write)
            # If the process dies now, the call is written nevertheless.
            await asyncio.shield(write)

    async def _generate(self, emit: Emit, request: Request, stream: bool) -> Completion:
        on_tokens = (lambda *tokens: emit(tokens)) if stream else None
        return await self.served(request.policy).engine.generate(request, on_tokens=on_tokens)

    def _on_death(self, process: _Process) -> None:
        assert process.failure is not None
        left = len(self._living())
        log.error("%s; %d of %d gateway processes continue", process.failure, left, self.n)
        if not left:
            self.on_failure(process.failure)


class _Process:
    """One gateway process.

    Attributes:
        url: where it listens.
        failure: why it has died; None while it lives.
    """

    def __init__(self, number: int, add_calls: Any, generate: Any, on_death: Callable[[_Process], None]) -> None:
        self.number = number
        self.url = ""
        self.failure: GatewayError | None = None
        self.peer = Peer({"add_calls": add_calls, "generate": generate}, self._on_loss)
        self._on_death = on_death
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._child is not None
        return self._child.process.pid

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    async def start(self, host: str, port: int, *options: Any) -> None:
        """Start it, and have it listen."""
        env = child_environment({"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"})
        self._child = Child("agl.trainer.gateway.processes.worker", env=env)
        await self._child.connect(self.peer)
        self.url = await self.peer.call("start", host, port, *options)

    async def stop(self) -> None:
        """End it: ask, then kill."""
        if self.url and self.failure is None:
            with contextlib.suppress(AglError, TimeoutError):
                await asyncio.wait_for(self.peer.call("stop"), _EXIT_SECONDS)
        self.peer.fail(GatewayError("the gateway was stopped"))
        if self._child is not None:
            await self._child.end()

    def _on_loss(self) -> None:
        assert self._child is not None
        ended = self._child.how_it_ended()
        tail = self._child.last_output()
        self.failure = GatewayError(
            f"gateway process {self.number} (pid {self.pid}) died with {ended}",
            hint=f"its last output was:\n{tail}" if tail else "was it killed, or out of memory?",
        )
        self.peer.fail(self.failure)
        self._on_death(self)
