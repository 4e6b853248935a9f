"""What LangChain calls no hook for: that a stream waits for its reader, and that a call was cancelled.

A generator runs in its reader's context, in which the scopes of its runs would stay current between two pieces. And a
cancelled model call or tool ends without a word. So `stream`, `astream`, `transform` and `atransform` of every
`Runnable`, `agenerate` of models and `arun` of tools are replaced while instrumented (langchain-core >= 1.0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from agl import tracing
from agl.adapters.aside import traced, traced_sync
from agl.adapters.patching import Patches

begun: ContextVar[list[UUID] | None] = ContextVar("agl_langchain_begun", default=None)
"""Ids of the runs that have begun in the model call or tool that runs here; the handler adds them."""


def patched(end: Callable[[UUID, BaseException], None]) -> Patches:
    """Replace LangChain's methods; the result restores them.

    Args:
        end: ends a run with the error that left it, unless it has ended.
    """
    from langchain_core.language_models import BaseChatModel, BaseLLM
    from langchain_core.runnables import Runnable
    from langchain_core.tools import BaseTool

    patches = Patches()
    sync_streams = dict.fromkeys(("stream", "transform"), _reading)
    async_streams = dict.fromkeys(("astream", "atransform"), _reading_async)
    patches.tree(Runnable, {**sync_streams, **async_streams})
    for cls, name in ((BaseChatModel, "agenerate"), (BaseLLM, "agenerate"), (BaseTool, "arun")):
        patches.method(cls, name, functools.partial(_ending, end))
    return patches


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    """A generator whose scopes are current only while it makes a piece."""

    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        pieces = functools.partial(method, *args, **kwargs)
        return pieces() if tracing.idle() else traced_sync(_no_scope, pieces, _nothing)

    return read


def _reading_async(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        pieces = functools.partial(method, *args, **kwargs)
        return pieces() if tracing.idle() else traced(_no_scope, pieces, _nothing)

    return read


def _no_scope() -> None:
    """The handler opens the scopes."""


def _nothing(*_: Any) -> None:
    """The handler ends them."""


def _ending(end: Callable[[UUID, BaseException], None], method: Callable[..., Any]) -> Callable[..., Any]:
    """A call that leaves no run of its own open when it is cancelled."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        if tracing.idle():
            return await method(*args, **kwargs)
        runs: list[UUID] = []
        outside = begun.set(runs)
        try:
            return await method(*args, **kwargs)
        except BaseException as error:
            for run_id in reversed(runs):
                end(run_id, error)
            raise
        finally:
            begun.reset(outside)

    return call
