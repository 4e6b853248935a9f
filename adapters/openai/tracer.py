"""`chat` spans of openai SDK calls that no framework span encloses.

Hook: `OpenAI.request` and `AsyncOpenAI.request` through `tracing.sdk_hooks` (openai >= 1.66, < 4); the SDK offers none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agl import semconv
from agl.adapters.base import INVALID
from agl.adapters.functions import ClientTracer
from agl.adapters.openai.runnable import handles, runnable
from agl.adapters.responses import finish_reason
from agl.adapters.streams import CallObserver, fields
from agl.messages import write
from agl.tracing import context, sdk_hooks


class OpenAITracer(ClientTracer):
    """Traces bare `openai` clients, sync and async, streaming and not, inside rollouts."""

    modules = ("openai",)
    answer_errors: ClassVar[Mapping[str, str]] = {"openai.LengthFinishReasonError": "length", **INVALID}
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        sdk_hooks.observe("openai", CallObserver("openai", _facts, _add_chunk))

    def _restore(self) -> None:
        sdk_hooks.observe("openai", None)


def switched_on() -> OpenAITracer | None:
    """Switch it on for a framework that leaves the spans of model calls to the SDK.

    Returns what is to be switched off with the framework's tracer: None if the user switched it on, and in a program
    that is traced as a whole, in which it comes on when the SDK is imported, which may be after the framework.
    """
    return None if OpenAITracer().instrumented or context.has_process_scope() else OpenAITracer().instrument()


def _add_chunk(chunk: Any, facts: dict[str, Any]) -> None:
    """Add a chunk's facts; a Responses stream carries the whole response in its first and its last event."""
    values = fields(chunk)
    if "choices" not in values:
        if values.get("response") is not None:
            facts.update(_facts(values["response"], False))
        return
    if not facts.get(semconv.RESPONSE_ID):
        facts |= {semconv.RESPONSE_ID: values.get("id"), semconv.RESPONSE_MODEL: values.get("model")}
    for choice in values["choices"] or ():
        if choice.finish_reason:
            facts.setdefault(semconv.FINISH_REASONS, []).append(choice.finish_reason)
    if values.get("usage") is not None:
        facts |= _usage(values["usage"])


def _facts(response: Any, content: bool) -> dict[str, Any]:
    values = fields(response)
    choices = values.get("choices") or ()
    output = values.get("output") or ()
    reasons = [c.finish_reason for c in choices if c.finish_reason]
    if not choices and (reason := _responses_reason(values, output)) is not None:
        reasons = [reason]
    facts: dict[str, Any] = {
        semconv.RESPONSE_ID: values.get("id"),
        semconv.RESPONSE_MODEL: values.get("model"),
        semconv.FINISH_REASONS: reasons or None,
        **_usage(values.get("usage")),
    }
    if content:
        messages = [
            m.model_dump(exclude_none=True, warnings=False)
            for c in choices
            if (m := fields(c).get("message")) is not None
        ]
        messages += [item.model_dump(exclude_none=True, warnings=False) for item in output]
        if messages:
            facts[semconv.OUTPUT_MESSAGES] = write.answer_json(messages, reasons)
    return facts


def _responses_reason(values: Mapping[str, Any], output: Sequence[Any]) -> str | None:
    incomplete = fields(values.get("incomplete_details")).get("reason")
    calls_tools = any(fields(item).get("type") == "function_call" for item in output)
    return finish_reason(values.get("status"), incomplete, calls_tools=calls_tools)


def _usage(usage: Any) -> dict[str, Any]:
    """Token counts; Responses and Chat Completions name them differently."""
    values = fields(usage)
    return {
        semconv.INPUT_TOKENS: values.get("prompt_tokens") or values.get("input_tokens"),
        semconv.OUTPUT_TOKENS: values.get("completion_tokens") or values.get("output_tokens"),
    }
