"""The parent's handle on a policy process: samples, trains and saves a policy that lives in a child.

Invariant: nothing waits for a dead child: when it ends, every waiting call fails with its exit code and last output.
When this process ends, however it ends, the child ends too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from agl.errors import EngineError
from agl.mdp import FloatArray, IntArray, int_array
from agl.sequence import Sequence
from agl.trainer.engine import Completion, OnTokens, Sampling
from agl.trainer.local.messages import (
    Abort,
    Command,
    Done,
    Failed,
    Finished,
    FrameReader,
    Generate,
    PolicyInfo,
    PolicySpec,
    Shutdown,
    Tokens,
    pack,
)

__all__ = ["LocalPolicy", "PolicyInfo", "PolicySpec"]

_TAIL_BYTES = 2000
_TERM_SECONDS = 2.0


class _Link(asyncio.Protocol):
    """The socket to the child: whole messages in, loss of the child out."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy
        self._reader = FrameReader()

    def data_received(self, data: bytes) -> None:
        for messages in self._reader.feed(data):
            self._policy._received(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        self._policy._lost()


class LocalPolicy:
    """A policy in a process of its own. An `agl.trainer.engine.Engine`, and the control of its learner.

    Made by `start`, ended by `close`; every call must come from the event loop that started it.

    Attributes:
        spec: what was asked for. info: what was loaded. version: of the weights, grown by each `train`.
    """

    info: PolicyInfo

    def __init__(self, spec: PolicySpec, process: subprocess.Popen[bytes], log: Any) -> None:
        self.spec = spec
        self.version = 0
        self._process = process
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, OnTokens] = {}
        self._transport: asyncio.Transport | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._tail = ""
        self._closing = False

    @classmethod
    async def start(cls, spec: PolicySpec, *, timeout: float = 120.0) -> LocalPolicy:
        """Start the process and load the model.

        Args:
            spec: what to load.
            timeout: seconds.

        Raises:
            ModelLoadError: the model does not load.
            EngineError: the process died or was not ready in time.
        """
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agl.trainer.local.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(spec),
            )
        except OSError:
            ours.close()
            log.close()
            raise
        finally:
            theirs.close()
        policy = cls(spec, process, log)
        ready = policy._wait_for(0)
        try:
            ours.setblocking(False)
            policy._transport, _ = await policy._loop.create_unix_connection(lambda: _Link(policy), sock=ours)
            policy._send(spec)
            policy.info = await asyncio.wait_for(ready, timeout)
        except BaseException as error:
            await policy.close(timeout=0.0)
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"the policy process was not ready after {timeout:g} s",
                    hint=f"raise the time limit, or look at its last output:\n{policy._tail}",
                    model=spec.model,
                ) from None
            raise
        policy._forget(0)
        return policy

    @property
    def max_context(self) -> int:
        """Longest prompt + answer, in tokens."""
        return self.info.max_context

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: Sampling,
        *,
        policy: str = "policy",
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one answer; see `agl.trainer.engine.Engine.generate`."""
        if policy != self.spec.name:
            raise EngineError(f"no policy {policy!r} is served here", hint=f"this engine serves {self.spec.name!r}")
        self._check()
        request_id = next(self._ids)
        future = self._wait_for(request_id)
        if on_tokens is not None:
            self._streams[request_id] = on_tokens
        self._send(Generate(request_id, int_array(prompt_ids), sampling, session, on_tokens is not None))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(Abort(request_id))
            raise
        finally:
            self._forget(request_id)

    async def train(self, sequences: list[Sequence], *, lr_scale: float = 1.0) -> dict[str, float]:
        """One update of the weights; returns the learner's metrics. The version grows by one."""
        return await self._command("train", sequences=sequences, lr_scale=lr_scale)

    async def logprobs(self, token_ids: IntArray, *, temperature: float = 1.0) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]` by the learner's forward pass."""
        return await self._command("logprobs", token_ids=np.asarray(token_ids, np.int32), temperature=temperature)

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
        """Go back to what `save_state` wrote.

        Raises:
            CheckpointError: the file is missing, broken or of another model.
        """
        await self._command("load_state", path=os.path.abspath(path))

    async def close(self, *, timeout: float = 5.0) -> None:
        """End the process: ask, wait `timeout` seconds, terminate, kill. Idempotent."""
        first, self._closing = not self._closing, True
        if self._process.poll() is None:
            if first and timeout > 0 and asyncio.get_running_loop() is self._loop:
                self._send(Shutdown())
                await self._ended(timeout)
            if self._process.poll() is None:
                self._process.terminate()
                if not await self._ended(_TERM_SECONDS):
                    self._process.kill()
                    await self._ended(_TERM_SECONDS)
        self._fail("the policy process was closed")
        if self._transport is not None and asyncio.get_running_loop() is self._loop:
            self._transport.close()
        if not self._log.closed:
            self._tail = self._last_output()
            self._log.close()

    # -- the child's side -----------------------------------------------------------------------------------------

    def _received(self, messages: list[Any]) -> None:
        for message in messages:
            match message:
                case Tokens():
                    self._stream(message)
                case Finished():
                    self._settle(message.request_id, message.completion)
                case Done():
                    self.version = message.version
                    self._settle(message.request_id, message.result)
                case Failed():
                    future = self._waiting.get(message.request_id)
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
            future = self._waiting.get(message.request_id)
            self._forget(message.request_id)
            if future is not None and not future.done():
                future.set_exception(error)

    def _settle(self, request_id: int, result: Any) -> None:
        future = self._waiting.get(request_id)
        if future is not None and not future.done():
            future.set_result(result)

    def _lost(self) -> None:
        if not self._closing:
            self._reaper = self._loop.create_task(self._report_death())

    async def _report_death(self) -> None:
        ended = await self._ended(_TERM_SECONDS)
        how = f"exit code {self._process.returncode}" if ended else "connection lost"
        self._fail(f"the policy process died ({how})", self._last_output())

    def _last_output(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()

    async def _ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return self._process.poll() is not None

    # -- calls ----------------------------------------------------------------------------------------------------

    async def _command(self, name: str, **arguments: Any) -> Any:
        self._check()
        request_id = next(self._ids)
        future = self._wait_for(request_id)
        self._send(Command(request_id, name, arguments))
        try:
            return await future
        finally:
            self._forget(request_id)

    def _check(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError(
                "the policy was called from another event loop than the one that started it",
                hint="start it inside the loop that uses it, or pass the call on by asyncio.run_coroutine_threadsafe",
            )
        if self._closing or self._failure is not None:
            raise self._error()

    def _wait_for(self, request_id: int) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        self._waiting[request_id] = future
        return future

    def _forget(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)
        self._streams.pop(request_id, None)

    def _send(self, message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))

    def _fail(self, what: str, output: str = "") -> None:
        """End every waiting call, and all later ones, with the same error; the first cause stays."""
        if self._failure is None:
            self._failure, self._tail = what, output
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._error())

    def _error(self) -> EngineError:
        hint = f"its last output was:\n{self._tail}" if self._tail else "start a new one"
        return EngineError(self._failure or "the policy process was closed", hint=hint, model=self.spec.model)


def _environment(spec: PolicySpec) -> dict[str, str]:
    """The child's environment: thread pools must be sized before torch is imported."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = spec.threads or max(1, cores - 1)
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
