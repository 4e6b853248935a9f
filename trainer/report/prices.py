"""What calls of other models cost, by the public prices that the package `genai-prices` lists."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from agl import semconv
from agl.mdp.spans import Span

LONGEST_NAME = 200
"""Of a model, in characters: what is longer is no name that a price list has."""


_TOKENS = {
    "input_tokens": semconv.INPUT_TOKENS,
    "output_tokens": semconv.OUTPUT_TOKENS,
    "cache_read_tokens": semconv.CACHE_READ_TOKENS,
    "cache_write_tokens": semconv.CACHE_CREATION_TOKENS,
    "cache_write_1h_tokens": semconv.HOUR_CACHE_TOKENS,
    "output_reasoning_tokens": semconv.REASONING_TOKENS,
    "input_audio_tokens": semconv.AUDIO_INPUT_TOKENS,
    "cache_audio_read_tokens": semconv.AUDIO_CACHE_READ_TOKENS,
    "output_audio_tokens": semconv.AUDIO_OUTPUT_TOKENS,
    "output_image_tokens": semconv.IMAGE_OUTPUT_TOKENS,
    "web_searches": semconv.WEB_SEARCHES,
}
"""What `genai-prices` calls the numbers of tokens and of searches. Cached ones are part of the input, reasoning is of
the output, and sound and pictures are of either."""


_PROVIDERS = {
    "x_ai": "x-ai",
    "gcp.gen_ai": "google",
    "gcp.vertex_ai": "google",
    "gcp.gemini": "google",
    "az.ai.inference": "azure",
    "az.ai.openai": "azure",
    "aws.bedrock": "aws",
    "mistral_ai": "mistral",
    "fireworks_ai": "fireworks",
    "grok": "x-ai",
}
"""`gen_ai.provider.name` of OpenTelemetry's conventions, and of frameworks -> the id of `genai-prices`, where the
package does not know the name or takes it for another's."""


def cost(span: Span) -> float | None:
    """US dollars of a `chat` span's call, at the price of its time; None where the package is not installed, knows no
    price, or the span has no numbers of tokens or is of a policy's call. Cached input, and reasoning, count at their
    own prices, where the span has their numbers and the provider has such prices.

    Where the span has the client's URL, a model is looked up among those of that provider alone: a server of one's own
    may call a model by any name.
    """
    if span.attributes.get(semconv.ROUTED):
        return None
    prices = [_price(facts, span) for facts in _iterations(span)]
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


def _iterations(span: Span) -> list[Mapping[str, Any]]:
    """The models and numbers of tokens of what the provider sampled, each of which has a price of its own: long prompts
    cost more a token. {} for what is unreadable."""
    answer = dict(span.attributes)
    recorded = answer.get(semconv.ITERATIONS)
    if recorded is None:
        return [answer]
    try:
        besides = json.loads(recorded)
    except (TypeError, ValueError):
        return [{}]
    if not isinstance(besides, list) or not all(isinstance(each, dict) for each in besides):
        return [{}]
    models = {name: answer.get(name) for name in (semconv.REQUEST_MODEL, semconv.RESPONSE_MODEL)}
    for counts in besides:
        if semconv.RESPONSE_MODEL in counts:
            continue
        for name in _TOKENS.values():
            included = counts.get(name)
            if isinstance(included, int) and isinstance(answer.get(name), int):
                answer[name] -= included
    return [answer, *({**models, **counts} for counts in besides)]


def _price(facts: Mapping[str, Any], span: Span) -> float | None:
    """US dollars of the tokens of one model, asked of the provider and at the time of a span."""
    calculate = _calculator()
    tokens = {of: facts[name] for of, name in _TOKENS.items() if facts.get(name) is not None}
    if "input_audio_tokens" in tokens and "cache_read_tokens" in tokens:
        # Without a number of them, the package would know no price.
        tokens.setdefault("cache_audio_read_tokens", 0)
    model = str(facts.get(semconv.RESPONSE_MODEL) or facts.get(semconv.REQUEST_MODEL) or "")
    counted = {"input_tokens", "output_tokens"} <= tokens.keys()
    known = model and counted and all(isinstance(n, int) and n >= 0 for n in tokens.values())
    if calculate is None or not known or len(model) > LONGEST_NAME:
        return None
    url = span.attributes.get(semconv.URL)
    provider = span.attributes.get(semconv.PROVIDER_NAME)
    sold_by = _price_list(str(provider)) if provider else None
    where = {"provider_api_url": str(url)} if url else {"provider_id": sold_by}
    try:
        return calculate(model, tokens, datetime.fromtimestamp(span.start, UTC), **where)
    except (LookupError, ValueError, OverflowError, OSError):
        # No such model or provider, or no such day.
        return None


def _price_list(provider: str) -> str:
    """The id in `genai-prices` of a provider that is named otherwise elsewhere."""
    # It takes every name with "openai" in it for OpenAI's.
    return "azure" if "azure" in provider.lower() else _PROVIDERS.get(provider, provider)


def total(spans: Iterable[Span]) -> float | None:
    """The sum over the spans whose price is known; None if that is none of them."""
    known = [price for span in spans if (price := cost(span)) is not None]
    return sum(known) if known else None


def dollars(value: float) -> str:
    """A sum of US dollars: whole cents from one dollar up, two significant digits below."""
    if value == 0 or value >= 1:
        return f"${value:,.2f}"
    return f"${value:.{max(2, 1 - math.floor(math.log10(value)))}f}"


@functools.cache
def _calculator() -> Callable[..., float] | None:
    """(model, numbers of tokens, time, provider) -> dollars; None where the package is not installed."""
    try:
        from genai_prices import Usage, calc_price
    except ImportError:
        return None

    def calculate(model: str, tokens: Mapping[str, int], at: datetime, **where: Any) -> float:
        usage = Usage(**tokens)
        return float(calc_price(usage, model, genai_request_timestamp=at, **where).total_price)

    return calculate
