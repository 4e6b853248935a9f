"""The numbers of tokens that an answer reports, as span attributes.

Sources: OpenAI API reference (`CompletionUsage`, `ResponseUsage`, Realtime), Anthropic API reference (`Usage`), Gemini
API reference (`UsageMetadata`, Live), Amazon Bedrock API reference (`TokenUsage`), what servers that are compatible
with them add (DeepSeek, Groq, Moonshot, xAI), and the objects of frameworks (Strands, LangChain, Agent Framework,
Pydantic AI). OpenTelemetry's attributes count cached tokens as input, and reasoning as output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agl import semconv

_DETAILS = frozenset(
    {
        "prompt_tokens_details",
        "input_tokens_details",
        "completion_tokens_details",
        "output_tokens_details",
        "input_token_details",
        "output_token_details",
        "cache_creation",
        "server_tool_use",
    }
)
"""Objects in a usage that hold further numbers."""
_ATTRIBUTES = {
    "prompt_tokens": semconv.INPUT_TOKENS,
    "promptTokenCount": semconv.INPUT_TOKENS,
    "prompt_token_count": semconv.INPUT_TOKENS,
    "input_tokens": semconv.INPUT_TOKENS,
    "inputTokens": semconv.INPUT_TOKENS,
    "input_token_count": semconv.INPUT_TOKENS,
    "completion_tokens": semconv.OUTPUT_TOKENS,
    "candidatesTokenCount": semconv.OUTPUT_TOKENS,
    "candidates_token_count": semconv.OUTPUT_TOKENS,
    "responseTokenCount": semconv.OUTPUT_TOKENS,
    "output_tokens": semconv.OUTPUT_TOKENS,
    "outputTokens": semconv.OUTPUT_TOKENS,
    "output_token_count": semconv.OUTPUT_TOKENS,
    "cached_tokens": semconv.CACHE_READ_TOKENS,
    "prompt_cache_hit_tokens": semconv.CACHE_READ_TOKENS,
    "cache_read_input_tokens": semconv.CACHE_READ_TOKENS,
    "cacheReadInputTokens": semconv.CACHE_READ_TOKENS,
    "cache_read_input_token_count": semconv.CACHE_READ_TOKENS,
    "cache_read_tokens": semconv.CACHE_READ_TOKENS,
    "cache_read": semconv.CACHE_READ_TOKENS,
    "cachedInputTokens": semconv.CACHE_READ_TOKENS,
    "cachedContentTokenCount": semconv.CACHE_READ_TOKENS,
    "cached_content_token_count": semconv.CACHE_READ_TOKENS,
    "cache_write_tokens": semconv.CACHE_CREATION_TOKENS,
    "cache_creation_input_tokens": semconv.CACHE_CREATION_TOKENS,
    "cacheWriteInputTokens": semconv.CACHE_CREATION_TOKENS,
    "cache_creation_input_token_count": semconv.CACHE_CREATION_TOKENS,
    "cache_creation": semconv.CACHE_CREATION_TOKENS,
    "ephemeral_1h_input_tokens": semconv.HOUR_CACHE_TOKENS,
    "cache_write_1h_tokens": semconv.HOUR_CACHE_TOKENS,
    "reasoning_tokens": semconv.REASONING_TOKENS,
    "thinking_tokens": semconv.REASONING_TOKENS,
    "reasoningTokens": semconv.REASONING_TOKENS,
    "reasoning_output_token_count": semconv.REASONING_TOKENS,
    "output_reasoning_tokens": semconv.REASONING_TOKENS,
    "reasoning": semconv.REASONING_TOKENS,
    "thoughtsTokenCount": semconv.REASONING_TOKENS,
    "thoughts_token_count": semconv.REASONING_TOKENS,
    "input_audio_tokens": semconv.AUDIO_INPUT_TOKENS,
    "cache_audio_read_tokens": semconv.AUDIO_CACHE_READ_TOKENS,
    "output_audio_tokens": semconv.AUDIO_OUTPUT_TOKENS,
    "web_search_requests": semconv.WEB_SEARCHES,
}
"""An API's name, or a framework's, of a number -> the attribute."""
_APART = (
    ("input_tokens", ("cache_read_input_tokens", "cache_creation_input_tokens")),
    ("inputTokens", ("cacheReadInputTokens", "cacheWriteInputTokens")),
    ("input_token_count", ("cache_read_input_token_count", "cache_creation_input_token_count")),
)
"""Names of an input that may exclude cached tokens, and of those. Anthropic and Bedrock count so; frameworks use the
same names for APIs that do not."""
_KINDS: Mapping[str, Mapping[str, str]] = {
    "prompt_tokens_details": {"audio_tokens": semconv.AUDIO_INPUT_TOKENS},
    "input_token_details": {"audio_tokens": semconv.AUDIO_INPUT_TOKENS, "audio": semconv.AUDIO_INPUT_TOKENS},
    "cached_tokens_details": {"audio_tokens": semconv.AUDIO_CACHE_READ_TOKENS},
    "completion_tokens_details": {"audio_tokens": semconv.AUDIO_OUTPUT_TOKENS},
    "output_token_details": {"audio_tokens": semconv.AUDIO_OUTPUT_TOKENS, "audio": semconv.AUDIO_OUTPUT_TOKENS},
    "promptTokensDetails": {"AUDIO": semconv.AUDIO_INPUT_TOKENS},
    "cacheTokensDetails": {"AUDIO": semconv.AUDIO_CACHE_READ_TOKENS},
    "candidatesTokensDetails": {"AUDIO": semconv.AUDIO_OUTPUT_TOKENS, "IMAGE": semconv.IMAGE_OUTPUT_TOKENS},
    "responseTokensDetails": {"AUDIO": semconv.AUDIO_OUTPUT_TOKENS, "IMAGE": semconv.IMAGE_OUTPUT_TOKENS},
}
"""The tokens of sound and pictures: where a usage counts them -> name or modality there -> attribute."""


def usage_facts(usage: Any) -> dict[str, Any]:
    """The attributes of a usage, which is JSON or an SDK's object; what it does not report is left out."""
    facts: dict[str, Any] = {**_counted(usage)}
    iterations = usage_fields(usage).get("iterations") or ()
    besides: list[Mapping[str, Any]] = []
    # Anthropic's: the tokens of these are billed, but are not in the sums.
    for iteration in iterations if isinstance(iterations, list | tuple) else ():
        fields = usage_fields(iteration)
        counts = _counted(iteration)
        match fields.get("type"):
            case "compaction":
                facts |= {name: facts.get(name, 0) + n for name, n in counts.items()}
                besides.append(counts)
            case "advisor_message":
                besides.append({semconv.RESPONSE_MODEL: str(fields.get("model")), **counts})
    if besides:
        facts[semconv.ITERATIONS] = json.dumps(besides)
    return facts


def _counted(usage: Any) -> dict[str, int]:
    """The attributes of the numbers that stand in a usage itself and in its details."""
    counts: dict[str, int] = {}
    for name, value in usage_fields(usage).items():
        if value.__class__ is int:
            counts[name] = value
        elif value and name in _DETAILS:
            counts |= {each: n for each, n in usage_fields(value).items() if n.__class__ is int}
    facts = {_ATTRIBUTES[name]: n for name, n in counts.items() if name in _ATTRIBUTES} | _of_kinds(usage)
    if apart := _cached_apart(counts):
        facts[semconv.INPUT_TOKENS] += apart
    tools = counts.get("toolUsePromptTokenCount", counts.get("tool_use_prompt_token_count"))
    if tools is not None:
        facts[semconv.INPUT_TOKENS] = facts.get(semconv.INPUT_TOKENS, 0) + tools
    reasoning = counts.get("thoughtsTokenCount", counts.get("thoughts_token_count"))
    if reasoning is None and semconv.REASONING_TOKENS in facts and "total_tokens" in counts:
        # xAI, too, counts reasoning apart. Only its total shows it.
        sampled = facts.get(semconv.OUTPUT_TOKENS, 0)
        total = counts["total_tokens"]
        if total == facts.get(semconv.INPUT_TOKENS, 0) + sampled + facts[semconv.REASONING_TOKENS]:
            reasoning = facts[semconv.REASONING_TOKENS]
    if reasoning:
        facts[semconv.OUTPUT_TOKENS] = facts.get(semconv.OUTPUT_TOKENS, 0) + reasoning
    return facts


def _cached_apart(counts: Mapping[str, int]) -> int:
    """How many cached tokens the input does not count."""
    if "prompt_tokens" in counts:
        return 0
    for of_input, of_cached in _APART:
        cached = sum(counts.get(name, 0) for name in of_cached)
        if of_input not in counts or not cached:
            continue
        total = counts.get("totalTokens", counts.get("total_token_count"))
        output = counts.get("outputTokens", counts.get("output_token_count", 0))
        if total is None or total == counts[of_input] + output + cached:
            return cached
    return 0


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
