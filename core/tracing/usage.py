"""The numbers of tokens that an answer reports, as span attributes.

Sources: OpenAI API reference (`CompletionUsage`, `ResponseUsage`, Realtime), Anthropic API reference (`Usage`), Gemini
API reference (`UsageMetadata`, Live), and what servers that are compatible with them add (DeepSeek, Groq, Moonshot,
xAI). OpenTelemetry's attributes count cached tokens as input, and reasoning as output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl import semconv

_DETAILS = frozenset({
    "prompt_tokens_details", "input_tokens_details", "completion_tokens_details", "output_tokens_details",
    "input_token_details", "output_token_details", "cache_creation", "server_tool_use",
})  # fmt: skip
"""Objects in a usage that hold further numbers."""
_ATTRIBUTES = {
    "prompt_tokens": semconv.INPUT_TOKENS,
    "promptTokenCount": semconv.INPUT_TOKENS,
    "input_tokens": semconv.INPUT_TOKENS,
    "completion_tokens": semconv.OUTPUT_TOKENS,
    "candidatesTokenCount": semconv.OUTPUT_TOKENS,
    "responseTokenCount": semconv.OUTPUT_TOKENS,
    "output_tokens": semconv.OUTPUT_TOKENS,
    "cached_tokens": semconv.CACHE_READ_TOKENS,
    "prompt_cache_hit_tokens": semconv.CACHE_READ_TOKENS,
    "cache_read_input_tokens": semconv.CACHE_READ_TOKENS,
    "cachedContentTokenCount": semconv.CACHE_READ_TOKENS,
    "cache_write_tokens": semconv.CACHE_CREATION_TOKENS,
    "cache_creation_input_tokens": semconv.CACHE_CREATION_TOKENS,
    "ephemeral_1h_input_tokens": semconv.HOUR_CACHE_TOKENS,
    "reasoning_tokens": semconv.REASONING_TOKENS,
    "thinking_tokens": semconv.REASONING_TOKENS,
    "thoughtsTokenCount": semconv.REASONING_TOKENS,
    "web_search_requests": semconv.WEB_SEARCHES,
}
_KINDS: Mapping[str, Mapping[str, str]] = {
    "prompt_tokens_details": {"audio_tokens": semconv.AUDIO_INPUT_TOKENS},
    "input_token_details": {"audio_tokens": semconv.AUDIO_INPUT_TOKENS},
    "cached_tokens_details": {"audio_tokens": semconv.AUDIO_CACHE_READ_TOKENS},
    "completion_tokens_details": {"audio_tokens": semconv.AUDIO_OUTPUT_TOKENS},
    "output_token_details": {"audio_tokens": semconv.AUDIO_OUTPUT_TOKENS},
    "promptTokensDetails": {"AUDIO": semconv.AUDIO_INPUT_TOKENS},
    "cacheTokensDetails": {"AUDIO": semconv.AUDIO_CACHE_READ_TOKENS},
    "candidatesTokensDetails": {"AUDIO": semconv.AUDIO_OUTPUT_TOKENS, "IMAGE": semconv.IMAGE_OUTPUT_TOKENS},
    "responseTokensDetails": {"AUDIO": semconv.AUDIO_OUTPUT_TOKENS, "IMAGE": semconv.IMAGE_OUTPUT_TOKENS},
}
"""The tokens of sound and pictures: where a usage counts them -> name or modality there -> attribute."""


def usage_facts(usage: Any) -> dict[str, int]:
    """The attributes of a usage, which is JSON or an SDK's object; what it does not report is left out."""
    counts: dict[str, int] = {}
    for name, value in usage_fields(usage).items():
        if value.__class__ is int:
            counts[name] = value
        elif value and name in _DETAILS:
            counts |= {each: n for each, n in usage_fields(value).items() if n.__class__ is int}
    facts = {_ATTRIBUTES[name]: n for name, n in counts.items() if name in _ATTRIBUTES} | _of_kinds(usage)
    if "input_tokens" in counts and "prompt_tokens" not in counts:
        # Anthropic's count excludes cached tokens.
        for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):
            if name in counts:
                facts[semconv.INPUT_TOKENS] += counts[name]
    if "toolUsePromptTokenCount" in counts:
        facts[semconv.INPUT_TOKENS] = facts.get(semconv.INPUT_TOKENS, 0) + counts["toolUsePromptTokenCount"]
    reasoning = counts.get("thoughtsTokenCount")
    if reasoning is None and semconv.REASONING_TOKENS in facts and "total_tokens" in counts:
        # xAI, too, counts reasoning apart. Only its total shows it.
        sampled, total = facts.get(semconv.OUTPUT_TOKENS, 0), counts["total_tokens"]
        if total == facts.get(semconv.INPUT_TOKENS, 0) + sampled + facts[semconv.REASONING_TOKENS]:
            reasoning = facts[semconv.REASONING_TOKENS]
    if reasoning:
        facts[semconv.OUTPUT_TOKENS] = facts.get(semconv.OUTPUT_TOKENS, 0) + reasoning
    return facts


def _of_kinds(usage: Any) -> dict[str, int]:
    """The attributes of the tokens that are sound or pictures, where there are any."""
    facts: dict[str, int] = {}
    for name, value in usage_fields(usage).items():
        if not value or (name not in _KINDS and name not in _DETAILS):
            continue
        if value.__class__ in (list, tuple):
            # Google's: a list of modalities.
            each = [usage_fields(one) for one in value]
            counts: Mapping[str, Any] = {str(one.get("modality")): one.get("tokenCount") for one in each}
        else:
            counts = usage_fields(value)
            facts |= _of_kinds({"cached_tokens_details": counts.get("cached_tokens_details")})
        kinds = _KINDS.get(name, {})
        facts |= {kinds[kind]: n for kind, n in counts.items() if kind in kinds and n.__class__ is int and n > 0}
    return facts


def reported_usage(body: Any) -> Any:
    """The usage in an answer or in a chunk of a stream, which is JSON or an SDK's object; None if it has none.

    Groq's streams have it in `x_groq`, and Moonshot's in a choice, unless the request asks for it.
    """
    known = usage_fields(body)
    if usage := known.get("usage") or known.get("usageMetadata"):
        return usage
    if groq := known.get("x_groq"):
        return usage_fields(groq).get("usage")
    choices = known.get("choices")
    return usage_fields(choices[-1]).get("usage") if choices and choices.__class__ is list else None


def usage_fields(value: Any) -> Mapping[str, Any]:
    """The fields of a JSON object or of an SDK's object, those included that the SDK does not know."""
    if value.__class__ is dict:
        return value
    known = getattr(value, "__dict__", {})
    unknown = getattr(value, "__pydantic_extra__", None)
    return {**known, **unknown} if unknown else known
