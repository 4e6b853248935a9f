"""Policies that live in other processes: sampled, trained and saved from here; those on one base model share a process.

Invariant: importing this module loads no torch. Nothing waits for a dead child: when it ends, every waiting call fails
with its exit code and last output. A child whose policies are closed waits two minutes for others (`processes`), which
then need not load the libraries.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from agl.errors import ConfigError, EngineError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray, IntArray, int_array
from agl.trainer.engines.base import Completion, OnTokens, Sampling
from agl.trainer.engines.frames import FrameReader, to_frame
from agl.trainer.local.processes import Child, last_output, take
from agl.trainer.local.protocol import (
    Abort,
    Command,
    Done,
    Failed,
    Finished,
    Generate,
    Loading,
    PolicyInfo,
    PolicySpec,
    Shutdown,
    Tokens,
    Waiting,
)

__all__ = ["LocalPolicy", "PolicyInfo", "PolicySpec", "start_policies"]

_TERM_SECONDS = 2.0
LOAD_HINT = "check the network and the disk, or raise load_timeout="
OnProgress = Callable[[str], object]
"""Called with what is being loaded."""


def _ignore(text: str) -> None:
    pass


class LocalPolicy:
    """A policy in a separate process, or in one shared with other adapters on the same base model.

    An `agl.trainer.engines.Engine`, and the control of its learner. Made by `start` or `start_policies`, ended by
    `close`; every call must come from the event loop that started it.

    Attributes:
        spec: the settings. info: what was loaded. version: of the weights, grown by each `train`.
        process: where it lives. names: under which it is served; a request for another policy is refused.
        prompt_tokens: of all answers. reused_tokens: those that the engine had computed for earlier requests.
    """

    def __init__(self, spec: PolicySpec, process: PolicyProcess) -> None:
        self.spec = spec
        self.process = process
        self.names = {spec.name}
        self.info: PolicyInfo = process.info[spec.name]
        self.version = 0
        self.prompt_tokens = self.reused_tokens = 0

    @classmethod
    async def start(cls, spec: PolicySpec, *, on_progress: OnProgress = _ignore) -> LocalPolicy:
        """Start a process for this policy alone and load it.

        Args:
            spec: what to load. on_progress: called with what is being loaded, such as "downloading model.safetensors:
                1.2 of 988.1 MB", once a second at most.

        Raises:
            ModelLoadError: the model does not load.
            EngineError: the process died, or made no progress for `spec.load_timeout` seconds.
        """
        return cls(spec, await PolicyProcess.start([spec], on_progress=on_progress))

    @property
    def processes(self) -> tuple[Any, ...]:
        """What it needs, each with `on_death` and `close`; policies may share them."""
        return (self.process,)

    @property
    def max_context(self) -> int:
        """Longest prompt + answer, in tokens."""
        return self.info.max_context

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: Sampling,
        *,
        policy: str | None = None,
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one answer; see `agl.trainer.engines.Engine.generate`."""
        self._check_name(policy)
        completion = await self.process.generate(self.spec.name, prompt_ids, sampling, on_tokens)
        self.prompt_tokens += len(prompt_ids)
        self.reused_tokens += completion.cached_tokens
        return completion

    async def train(
        self, sequences: list[TrainingRow], *, lr_scale: float = 1.0, pairs: Seq[tuple[str, str]] = ()
    ) -> dict[str, float]:
        """One update of the weights; returns the learner's metrics. The version grows by one.

        Args:
            sequences, lr_scale, pairs: see `agl.trainer.local.learner.learner.Learner.update`.

        Raises:
            EngineError: a row belongs to another policy.
        """
        foreign = next((s for s in sequences if s.policy != self.spec.name), None)
        if foreign is not None:
            raise EngineError(
                f"a row of policy {foreign.policy!r} was passed to policy {self.spec.name!r} to train on",
                hint="please report this: a policy is trained on its own tokens alone",
                rollout=foreign.rollout_id,
            )
        return await self._command("train", sequences=sequences, lr_scale=lr_scale, pairs=pairs)

    async def publish(self) -> None:
        """Serve the weights in training from now on. With `max_staleness=0` they always are, and nothing changes."""
        await self._command("publish")

    async def logprobs(self, token_ids: IntArray, *, temperature: float = 1.0) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]` by the learner's forward pass."""
        return await self._command("logprobs", token_ids=np.asarray(token_ids, np.int32), temperature=temperature)

    async def sequence_logprobs(self, sequences: Seq[TrainingRow]) -> list[FloatArray]:
        """float32 [T] per row: each trained token's log-prob in its own context, by the learner's forward pass; 0
        elsewhere."""
        return await self._command("sequence_logprobs", sequences=list(sequences))

    async def engine_logprobs(self, token_ids: IntArray, *, temperature: float = 1.0) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]` by the engine's cached decoding."""
        return await self._command(
            "engine_logprobs", token_ids=np.asarray(token_ids, np.int32), temperature=temperature
        )

    async def save_model(self, path: str | Path) -> None:
        """Write model and tokenizer as a Hugging Face directory."""
        await self._command("save_model", path=os.path.abspath(path))

    async def save_state(self, path: str | Path) -> None:
        """Write weights, optimiser, RNG and version to a file, for an exact resume."""
        await self._command("save_state", path=os.path.abspath(path))

    async def load_state(self, path: str | Path) -> None:
        """Restore what `save_state` wrote.

        Raises:
            CheckpointError: the file is missing, broken or of another model.
        """
        await self._command("load_state", path=os.path.abspath(path))

    async def close(self, *, timeout: float = 5.0) -> None:
        """End the policy, and the others of its process; see `PolicyProcess.close`. Idempotent."""
        await self.process.close(timeout=timeout)

    def _check_name(self, policy: str | None) -> None:
        if policy is not None and policy not in self.names:
            serves = ", ".join(map(repr, sorted(self.names)))
            raise EngineError(f"no policy {policy!r} is served here", hint=f"this engine serves {serves}")

    async def _command(self, name: str, **arguments: Any) -> Any:
        done = await self.process.command(self.spec.name, name, **arguments)
        self.version = done.version
        return done.result


async def start_policies(specs: Seq[PolicySpec], *, on_progress: OnProgress = _ignore) -> dict[str, LocalPolicy]:
    """Load several policies: adapters on the same base in one process, which samples them in one batch; any other in a
    separate process. `on_progress`: as for `LocalPolicy.start`.

    Returns:
        Policies by name, in the order of `specs`.

    Raises:
        ConfigError: two have the same name.
        ModelLoadError, EngineError: as `LocalPolicy.start`; none is left running then.
    """
    groups: dict[object, list[PolicySpec]] = {}
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise ConfigError(f"two policies are named {spec.name!r}", hint="give each its own name")
        names.add(spec.name)
        groups.setdefault(spec.base if spec.lora is not None else spec.name, []).append(spec)
    started = await asyncio.gather(
        *(PolicyProcess.start(group, on_progress=on_progress) for group in groups.values()), return_exceptions=True
    )
    processes = [p for p in started if isinstance(p, PolicyProcess)]
    failed = next((p for p in started if isinstance(p, BaseException)), None)
    if failed is not None:
        await asyncio.gather(*(p.close(timeout=0.0) for p in processes))
        raise failed
    policies = {spec.name: LocalPolicy(spec, process) for process in processes for spec in process.specs}
    return {spec.name: policies[spec.name] for spec in specs}


class _Link(asyncio.Protocol):
    """The socket to the child: whole messages in, loss of the child out."""

    def __init__(self, process: PolicyProcess) -> None:
        self._process = process
        self._reader = FrameReader()

    def data_received(self, data: bytes) -> None:
        for messages in self._reader.feed(data):
            self._process._on_messages(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        self._process._on_connection_lost()


class PolicyProcess:
    """A child process that serves and trains the policies of one base model.

    Made by `start`, ended by `close`; every call must come from the event loop that started it.

    Attributes:
        specs: the policies. info: what was loaded, by policy.
    """

    info: dict[str, PolicyInfo]

    def __init__(self, specs: Seq[PolicySpec], child: Child) -> None:
        self.specs = tuple(specs)
        self._child = child
        self._process = child.process
        self._released = False
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, OnTokens] = {}
        self._transport: asyncio.Transport | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._tail = ""
        self._closing = False
        self._on_death: Callable[[EngineError], None] = lambda error: None
        self._on_loading: OnProgress = _ignore

    @classmethod
    async def start(cls, specs: Seq[PolicySpec], *, on_progress: OnProgress = _ignore) -> PolicyProcess:
        """Start the process and load the policies.

        Args:
            specs: policies of one `base`; more than one only where each has a LoRA adapter.
            on_progress: as for `LocalPolicy.start`.

        Raises:
            ModelLoadError: the model does not load.
            EngineError: the process died, or made no progress for `load_timeout` seconds.
        """
        child = take(specs[0].threads)
        process = cls(specs, child)
        ready = process._new_future(0)
        limit, last = specs[0].load_timeout, "starting"

        def on_loading(text: str) -> None:
            nonlocal last
            last = text
            if limit is not None and not deadline.expired():
                deadline.reschedule(process._loop.time() + limit)
            on_progress(text)

        try:
            # The transport closes its socket, and another policy may come to need the child's.
            connection = child.connection.dup()
            connection.setblocking(False)
            process._transport, _ = await process._loop.create_unix_connection(lambda: _Link(process), sock=connection)
            process._send(process.specs)
            async with asyncio.timeout(limit) as deadline:
                process._on_loading = on_loading
                process.info = (await ready).result
        except BaseException as error:
            await process.close(timeout=0.0)
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"the policy made no progress for {limit:g} s while it was loaded ({last})",
                    hint=f"{LOAD_HINT}; its last output was:\n{process._tail}",
                    model=specs[0].model,
                ) from None
            raise
        finally:
            process._on_loading = _ignore
        process._forget(0)
        return process

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of the child; None while it runs."""
        return self._process.poll()

    def on_death(self, callback: Callable[[EngineError], None]) -> None:
        """Have `callback` called with the error when the process dies; at once if it already has."""
        self._on_death = callback
        if self._failure is not None:
            callback(self._error())

    async def generate(
        self, policy: str, prompt_ids: IntArray, sampling: Sampling, on_tokens: OnTokens | None
    ) -> Completion:
        """Sample one answer; see `agl.trainer.engines.Engine.generate`."""
        self._check()
        request_id = next(self._ids)
        future = self._new_future(request_id)
        if on_tokens is not None:
            self._streams[request_id] = on_tokens
        self._send(Generate(request_id, policy, int_array(prompt_ids), sampling, on_tokens is not None))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(Abort(request_id))
            raise
        finally:
            self._forget(request_id)

    async def command(self, policy: str, name: str, **arguments: Any) -> Done:
        """Run one of the worker's commands for a policy; what it raises there is raised here."""
        self._check()
        request_id = next(self._ids)
        future = self._new_future(request_id)
        self._send(Command(request_id, policy, name, arguments))
        try:
            return await future
        finally:
            self._forget(request_id)

    async def close(self, *, timeout: float = 5.0) -> None:
        """End the policies. Idempotent.

        On CPU the process then waits for others. One that has not answered in `timeout` seconds is terminated and
        killed; with 0 it is terminated at once.
        """
        first, self._closing = not self._closing, True
        if self._released:
            return
        if self._process.poll() is None:
            if first and timeout > 0 and asyncio.get_running_loop() is self._loop:
                self._send(Shutdown())
                await self._wait_for_exit(timeout)
            if self._process.poll() is None and not self._released:
                self._process.terminate()
                if not await self._wait_for_exit(_TERM_SECONDS):
                    self._process.kill()
                    await self._wait_for_exit(_TERM_SECONDS)
        self._fail("the policy process was closed")
        if self._transport is not None and asyncio.get_running_loop() is self._loop:
            self._transport.close()
        if not self._child.log.closed:
            self._tail = last_output(self._child.log)
            if self._released:
                self._child.wait()
            else:
                self._child.close()

    # -- the child's side -----------------------------------------------------------------------------------------

    def _on_messages(self, messages: list[Any]) -> None:
        for message in messages:
            match message:
                case Tokens():
                    self._stream(message)
                case Loading():
                    self._on_loading(message.text)
                case Finished():
                    self._resolve(message.request_id, message.completion)
                case Done():
                    self._resolve(message.request_id, message)
                case Waiting():
                    self._released = True
                case Failed():
                    future = self._pending.get(message.request_id)
                    if future is not None and not future.done():
                        future.set_exception(message.error)

    def _stream(self, message: Tokens) -> None:
        on_tokens = self._streams.get(message.request_id)
        if on_tokens is None:
            return
        try:
            on_tokens(message.token_ids, message.logprobs)
        except Exception as error:
            self._send(Abort(message.request_id))
            future = self._pending.get(message.request_id)
            self._forget(message.request_id)
            if future is not None and not future.done():
                future.set_exception(error)

    def _resolve(self, request_id: int, result: Any) -> None:
        future = self._pending.get(request_id)
        if future is not None and not future.done():
            future.set_result(result)

    def _on_connection_lost(self) -> None:
        if not self._closing:
            self._reaper = self._loop.create_task(self._report_death())

    async def _report_death(self) -> None:
        exited = await self._wait_for_exit(_TERM_SECONDS)
        how = f"exit code {self._process.returncode}" if exited else "connection lost"
        self._fail(f"the policy process died ({how})", last_output(self._child.log))
        self._on_death(self._error())

    async def _wait_for_exit(self, seconds: float) -> bool:
        """Wait until the process has exited or released its policies; whether it has exited."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and not self._released and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return self._process.poll() is not None

    # -- calls ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError(
                "the policy was called from another event loop than the one that started it",
                hint="start it inside the loop that uses it, or pass the call on by asyncio.run_coroutine_threadsafe",
            )
        if self._closing or self._failure is not None:
            raise self._error()

    def _new_future(self, request_id: int) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        self._pending[request_id] = future
        return future

    def _forget(self, request_id: int) -> None:
        self._pending.pop(request_id, None)
        self._streams.pop(request_id, None)

    def _send(self, message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(to_frame(message))

    def _fail(self, what: str, output: str = "") -> None:
        """End every waiting call, and all later ones, with the same error; the first cause stays."""
        if self._failure is None:
            self._failure, self._tail = what, output
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._error())

    def _error(self) -> EngineError:
        hint = f"its last output was:\n{self._tail}" if self._tail else "start a new one"
        return EngineError(self._failure or "the policy process was closed", hint=hint, model=self.specs[0].model)
