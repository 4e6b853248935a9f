"""What calls of other models cost, by the public prices that the package `genai-prices` lists."""

from __future__ import annotations

import functools
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


def cost(span: Span) -> float | None:
    """US dollars of a `chat` span's call, at the price of its time; None where the package is not installed, knows no
    price, or the span has no numbers of tokens or is of a policy's call. Cached input, and reasoning, count at their
    own prices, where the span has their numbers and the provider has such prices.

    Where the span has the client's URL, a model is looked up among those of that provider alone: a server of one's own
    may call a model by any name.
    """
    a = span.attributes
    calculate = _calculator()
    tokens = {of: a[name] for of, name in _TOKENS.items() if a.get(name) is not None}
    if "input_audio_tokens" in tokens and "cache_read_tokens" in tokens:
        # Without a number of them, the package would know no price.
        tokens.setdefault("cache_audio_read_tokens", 0)
    model = str(a.get(semconv.RESPONSE_MODEL) or a.get(semconv.REQUEST_MODEL) or "")
    counted = {"input_tokens", "output_tokens"} <= tokens.keys()
    known = model and counted and all(isinstance(n, int) and n >= 0 for n in tokens.values())
    if calculate is None or not known or len(model) > LONGEST_NAME or a.get(semconv.ROUTED):
        return None
    url, provider = a.get(semconv.URL), a.get(semconv.PROVIDER_NAME)
    where = {"provider_api_url": str(url)} if url else {"provider_id": str(provider) if provider else None}
    try:
        return calculate(model, tokens, datetime.fromtimestamp(span.start, UTC), **where)
    except (LookupError, ValueError, OverflowError, OSError):
        # No such model or provider, or no such day.
        return None


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
