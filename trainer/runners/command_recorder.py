"""Records what commands ask their own providers, as `agl run` does, and puts other system prompts into it.

One server per worker process stands between its commands and their providers. A command that a policy answers talks to
the gateway instead.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from agl import tracing
from agl.errors import RolloutError
from agl.mdp.spans import Span
from agl.tracing.inferred import SpanInference
from agl.trainer.gateway.errors import RequestError
from agl.trainer.http.errors import error_handlers
from agl.trainer.http.limits import Limits
from agl.trainer.http.server import HttpServer
from agl.trainer.runners.provider_calls import api_of, provider_error
from agl.trainer.runners.recording_proxy import RecordingProxy, client_variables, provider_bases


class CommandRecorder:
    """The proxies of one worker's commands, behind one address. Lives on one event loop."""

    def __init__(self) -> None:
        self._limits = Limits.of_environment()
        self._server = HttpServer(self._serve, error=RolloutError, limits=self._limits)
        self._attempts: dict[str, tuple[RecordingProxy, Starlette]] = {}

    async def start(self) -> None:
        """Listen on a free port of loopback.

        Raises:
            RolloutError: there is none.
        """
        await self._server.start()

    async def stop(self) -> None:
        """Stop listening. Idempotent."""
        await self._server.stop()

    def variables(self, context: tracing.RolloutContext, agent: str, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables with which a command of this attempt calls its providers from now on; from any thread."""
        scope = tracing.current()
        assert scope is not None
        trace_id, span_id = scope.traceparent.split("-")[1:3]
        inference = SpanInference(context.rollout_id, context.attempt, trace_id, span_id, context.capture_content)
        proxy = RecordingProxy(_Spans(context), inference, provider_bases(environment), context.system_prompts)
        app = Starlette(routes=proxy.call_routes(), exception_handlers=error_handlers(describe, RequestError))
        app.state.limits = self._limits
        self._attempts[_place(context)] = proxy, app
        return client_variables(environment, proxy.provider_urls(self._server.url, agent))

    async def close(self, context: tracing.RolloutContext) -> None:
        """End an attempt: its URLs die, its calls are among the attempt's spans."""
        entry = self._attempts.get(_place(context))
        if entry is not None:
            await entry[0].close()
            del self._attempts[_place(context)]

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = "/".join(urllib.parse.unquote(scope["path"]).split("/")[:5])
        entry = self._attempts.get(place)
        app = entry[1] if entry is not None else _CLOSED
        await app(scope, receive, send)


class _Spans:
    """Adds spans to those of an attempt."""

    def __init__(self, context: tracing.RolloutContext) -> None:
        self.context = context

    async def add_spans(self, spans: Sequence[Span]) -> None:
        self.context.spans.extend(spans)


_CLOSED = Starlette()


def _place(context: tracing.RolloutContext) -> str:
    return f"/rollouts/{context.rollout_id}/attempts/{context.attempt}"


def describe(request: Request, error: Exception) -> tuple[object, int]:
    """The body and the status with which a program is answered for an error, as `error_handlers` takes it."""
    return provider_error(api_of(request), error)
