"""`chat` spans of google-genai calls that no framework span encloses.

Hook: `BaseApiClient._request` and `._async_request` by `tracing.sdk_hooks` (google-genai >= 1.60, < 4); the SDK offers
none.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from agl import tracing
from agl.adapters.functions import ClientTracer
from agl.adapters.google_genai.runnable import handles, runnable
from agl.adapters.streams import CallObserver, Reader
from agl.tracing import sdk_hooks
from agl.tracing.context import Scope
from agl.tracing.provider_formats import ResponseAccumulator


class _Observer(CallObserver):
    def finished(self, scope: Scope, result: Any) -> Any:
        if isinstance(result.response_stream, list):
            answer = ResponseAccumulator()
            with contextlib.suppress(ValueError):
                answer.event(json.loads(result.response_stream[0]))
            tracing.end(scope, attributes=answer.facts(scope.rollout.capture_content))
        else:
            segments = result.segments
            async_segments = result.async_segments
            result.segments = lambda: Reader(scope, segments(), None)
            result.async_segments = lambda: Reader(scope, async_segments(), None)
        return result


class GoogleGenAITracer(ClientTracer):
    """Traces bare `google-genai` clients, sync and async, streaming and not, inside rollouts."""

    modules = (sdk_hooks.GENAI,)
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        sdk_hooks.observe(sdk_hooks.GENAI, _Observer("google"))

    def _restore(self) -> None:
        sdk_hooks.observe(sdk_hooks.GENAI, None)
