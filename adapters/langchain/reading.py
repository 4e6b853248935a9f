"""What LangChain calls no hook for: that a stream waits for its reader, and that a call was cancelled.

A generator runs in its reader's context, in which the scopes of its runs would stay current between two pieces. And a
cancelled model call or tool ends without a word. So `stream`, `astream`, `transform` and `atransform` of every
`Runnable`, `agenerate` of models and `arun` of tools are replaced while instrumented (langchain-core >= 1.0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from agl import tracing
from agl.adapters.aside import traced, traced_sync
from agl.adapters.patching import Patches
from agl.tracing import context
from agl.tracing.context import Scope


def patched(end: Callable[[Scope, BaseException], None]) -> Patches:
    """Replace LangChain's methods; the result restores them.

    Args:
        end: ends the run that opened a scope, with the error that left it.
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


def _ending(end: Callable[[Scope, BaseException], None], method: Callable[..., Any]) -> Callable[..., Any]:
    """A call that leaves no scope open when it is cancelled."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        if tracing.idle():
            return await method(*args, **kwargs)
        outside = context.snapshot()
        try:
            return await method(*args, **kwargs)
        except BaseException as error:
            scope = context.snapshot()
            while scope is not None and scope is not outside:
                end(scope, error)
                scope = scope.parent
            context.restore(outside)
            raise

    return call
