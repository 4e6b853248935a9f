"""What calls of other models cost, by the public prices that the package `genai-prices` lists."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from datetime import UTC, datetime

from agl import semconv
from agl.mdp.spans import Span


def cost(span: Span) -> float | None:
    """US dollars of a `chat` span's call, at the price of its day; None where the package is not installed, knows no
    price, or the span has no numbers of tokens or is of a policy's call. Input that the provider had cached counts in
    full.

    Where the span has the client's URL, a model is looked up among those of that provider alone: a server of one's own
    may call a model by any name.
    """
    a = span.attributes
    if a.get(semconv.ROUTED):
        return None
    tokens = a.get(semconv.INPUT_TOKENS), a.get(semconv.OUTPUT_TOKENS)
    model = a.get(semconv.RESPONSE_MODEL) or a.get(semconv.REQUEST_MODEL)
    if model is None or not all(isinstance(n, int) and n >= 0 for n in tokens):
        return None
    url, provider = a.get(semconv.URL), a.get(semconv.PROVIDER_NAME)
    day = datetime.fromtimestamp(span.start, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return _price(str(model), str(url or ""), str(provider or ""), day, *tokens)


def total(spans: Iterable[Span]) -> float | None:
    """The sum over the spans whose price is known; None if that is none of them."""
    known = [price for span in spans if (price := cost(span)) is not None]
    return sum(known) if known else None


@functools.lru_cache(maxsize=4096)
def _price(model: str, url: str, provider: str, day: datetime, n_input: int, n_output: int) -> float | None:
    try:
        from genai_prices import Usage, calc_price
    except ImportError:
        return None
    usage = Usage(input_tokens=n_input, output_tokens=n_output)
    try:
        if url:
            found = calc_price(usage, model, provider_api_url=url, genai_request_timestamp=day)
        else:
            found = calc_price(usage, model, provider_id=provider or None, genai_request_timestamp=day)
        return float(found.total_price)
    except LookupError:
        return None
