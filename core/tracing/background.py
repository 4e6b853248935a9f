"""Calls whose answer is retrieved by other requests: `background=True` of the Responses API.

The `chat` span of such a call stays open until a request to `/responses/{id}` (or its `/cancel`) returns the answer.
Where nobody retrieves it, the span ends with the attempt.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from agl.tracing import context
from agl.tracing.context import RolloutContext, Scope

UNFINISHED = ("queued", "in_progress")
"""The states of a response whose answer is still to come."""
MOST = 1000
"""Calls that wait in a rollout at a time. The oldest ends for the next, so that a server does not grow for ever."""

_PATH = re.compile(r"/responses/([^/?]+)(?:/cancel)?/?(?:\?.*)?$")
_waiting: weakref.WeakKeyDictionary[RolloutContext, dict[str, Scope]] = weakref.WeakKeyDictionary()


def wait(scope: Scope, response_id: str) -> None:
    """Keep a call's span open until its answer is retrieved. It is no longer current."""
    waiting = _waiting.setdefault(scope.rollout, {})
    waiting[response_id] = scope
    if context.snapshot() is scope:
        context.restore(scope.parent)
    if len(waiting) > MOST:
        context.end(waiting.pop(next(iter(waiting))))


class Retrieval:
    """A request for the answer of a call that waits."""

    def __init__(
        self, client: Any, args: Any, kwargs: Any, scope: Scope, response_id: str, finished: Callable[[Scope, Any], Any]
    ) -> None:
        self.client = client
        self.args = args
        self.kwargs = kwargs
        self.scope = scope
        self.response_id = response_id
        self.finished = finished

    def client_to_send(self, *, is_async: bool) -> Any:
        """The client that was asked."""
        return self.client

    def sending(self) -> AbstractContextManager[None]:
        """Nothing: the answer can be retrieved again."""
        return contextlib.nullcontext()

    def end(self, result: Any) -> Any:
        """End the call's span with the answer, if it is there; with its stream, if it is streamed."""
        known = getattr(result, "__dict__", {})
        if known.get("status") not in UNFINISHED and ("status" in known or "_iterator" in known):
            _waiting.get(self.scope.rollout, {}).pop(self.response_id, None)
            return self.finished(self.scope, result)
        return result


def retrieval(
    client: Any, args: Any, kwargs: Any, url: str, rollout: RolloutContext, finished: Callable[[Scope, Any], Any] | None
) -> Retrieval | None:
    """The request to a URL as one for the answer of a call that waits; None if it is no such request."""
    waiting = _waiting.get(rollout)
    if not waiting or finished is None or (found := _PATH.search(url)) is None:
        return None
    scope = waiting.get(found[1])
    return None if scope is None else Retrieval(client, args, kwargs, scope, found[1], finished)
