"""`chat` spans of openai SDK calls that no framework span encloses.

Hook: `OpenAI.request` and `AsyncOpenAI.request` through `tracing.sdk_hooks` (openai >= 1.66, < 4); the SDK offers none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from agl.adapters.functions import ClientTracer
from agl.adapters.openai.runnable import handles, runnable
from agl.adapters.streams import CallObserver
from agl.tracing import context, sdk_hooks


class OpenAITracer(ClientTracer):
    """Traces bare `openai` clients, sync and async, streaming and not, inside rollouts."""

    modules = ("openai",)
    answer_errors: ClassVar[Mapping[str, str]] = {"openai.LengthFinishReasonError": "length"}
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        sdk_hooks.observe("openai", CallObserver("openai"))

    def _restore(self) -> None:
        sdk_hooks.observe("openai", None)


def switched_on() -> OpenAITracer | None:
    """Switch it on for a framework that leaves the spans of model calls to the SDK.

    Returns what is to be switched off with the framework's tracer: None if the user switched it on, and in a program
    that is traced as a whole, in which it comes on when the SDK is imported, which may be after the framework.
    """
    return None if OpenAITracer().instrumented or context.has_process_scope() else OpenAITracer().instrument()
