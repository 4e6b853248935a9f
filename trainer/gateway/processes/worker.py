"""A gateway process, `python -m agl.trainer.gateway.processes.worker FD`: serves the attempts that its parent opens.

Invariant: it lives no longer than its parent. Its engines and its store are the parent's, at the other end of FD.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agl.mdp.types import Call
from agl.trainer.engines.base import Completion, OnTokens, Request
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http.limits import Limits
from agl.trainer.processes.child import serve_parent
from agl.trainer.processes.peer import Emit, Peer
from agl.trainer.rendering.rendering import Rendering


class _Engine:
    """A policy's engine, in the parent."""

    def __init__(self, peer: Peer, max_context: int, grammars: bool | str) -> None:
        self._peer = peer
        self.max_context = max_context
        self.grammars = grammars

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        """See `agl.trainer.engines.Engine.generate`."""
        on_event = None if on_tokens is None else lambda tokens: on_tokens(*tokens)
        return await self._peer.call("generate", request, on_tokens is not None, on_event=on_event)


class _Store:
    """The one method of a store that a gateway calls; the parent's store does the rest."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._sizes: dict[tuple[str, int], dict[str, int]] = {}

    async def add_calls(self, calls: Sequence[Call]) -> None:
        await self._peer.call("add_calls", [self._sent(call) for call in calls])

    def _sent(self, call: Call) -> tuple[Call, int]:
        """A call without the tokens of the call that it continues, and their number: the parent has them."""
        self._sizes.setdefault((call.rollout_id, call.attempt), {})[call.id] = (
            call.prompt_ids.size + call.response_ids.size
        )
        shared = self._sizes[call.rollout_id, call.attempt].get(call.parent_id or "", 0)
        return replace(call, prompt_ids=call.prompt_ids[shared:]), shared

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Forget the calls of an attempt that has ended."""
        self._sizes.pop((rollout_id, attempt), None)


class Worker:
    """What the parent may call."""

    def __init__(self) -> None:
        names = ("start", "serve", "open", "close", "hold", "release", "cancel", "stop")
        self.peer = Peer({name: getattr(self, name) for name in names}, lambda: os._exit(0))
        self._holding = contextlib.AsyncExitStack()

    async def start(self, emit: Emit, host: str, port: int, limits: Limits, content: bool, hold_timeout: float) -> str:
        """Listen; returns the base URL."""
        self._store = _Store(self.peer)
        store: Any = self._store
        self._gateway = Gateway(store, capture_content=content, hold_timeout=hold_timeout)
        self._server = GatewayServer(self._gateway, host=host, port=port, limits=limits)
        return await self._server.start()

    def serve(
        self,
        emit: Emit,
        name: str,
        rendering: bytes,
        stop_token_ids: tuple[int, ...],
        max_context: int,
        grammars: bool | str,
    ) -> None:
        """Serve a policy; its engine is in the parent."""
        self._gateway.serve(name, _Engine(self.peer, max_context, grammars), _unpickled(rendering), stop_token_ids)
        # As a run does: collections would visit the tokenizer's and the libraries' objects each time.
        gc.collect()
        gc.freeze()

    def open(self, emit: Emit, access: tuple[Any, ...]) -> None:
        """Admit the requests of an attempt; see `Access.for_process`."""
        self._gateway.admit(Access(*access))

    async def close(self, emit: Emit, rollout_id: str, attempt: int) -> None:
        """End an attempt; its calls have been passed to the parent's store."""
        await self._gateway.close_attempt(rollout_id, attempt)
        self._store.forget(rollout_id, attempt)

    async def hold(self, emit: Emit) -> None:
        """Hold requests until `release`."""
        await self._holding.enter_async_context(self._gateway.hold())

    async def release(self, emit: Emit) -> None:
        """End `hold`."""
        await self._holding.aclose()

    def cancel(self, emit: Emit, status: int, message: str, code: str | None) -> None:
        """Cancel the running requests."""
        self._gateway.cancel_requests(RequestError(status, message, code=code))

    async def stop(self, emit: Emit) -> None:
        """Stop listening."""
        await self._server.stop()


def _unpickled(rendering: bytes) -> Rendering:
    """A rendering, without torch, which transformers imports for its models: 2 s and 180 MB of each process."""
    if "torch" in sys.modules:
        return pickle.loads(rendering)
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        return pickle.loads(rendering)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
    finally:
        del sys.modules["torch"]
    # The tokenizer's own code needs it.
    return pickle.loads(rendering)


if __name__ == "__main__":
    asyncio.run(serve_parent(Worker().peer))
