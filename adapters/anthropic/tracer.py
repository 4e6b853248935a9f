"""`chat` spans of anthropic SDK calls that no framework span encloses.

Hook: `Anthropic.request` and `AsyncAnthropic.request` by `tracing.sdk_hooks` (anthropic >= 0.50, < 3); the SDK offers
none. The OpenTelemetry spans that anthropic 2 makes itself go to the user's provider, unchanged.
"""

from __future__ import annotations

from agl.adapters.anthropic.runnable import handles, runnable
from agl.adapters.functions import ClientTracer
from agl.adapters.streams import CallObserver
from agl.tracing import sdk_hooks


class AnthropicTracer(ClientTracer):
    """Traces bare `anthropic` clients, sync and async, streaming and not, inside rollouts."""

    modules = ("anthropic",)
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        sdk_hooks.observe("anthropic", CallObserver("anthropic"))

    def _restore(self) -> None:
        sdk_hooks.observe("anthropic", None)
