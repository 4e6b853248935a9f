"""What calls of other models cost, by the public prices that the package `genai-prices` lists."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from agl import semconv
from agl.mdp.spans import Span

LONGEST_NAME = 200
"""Of a model, in characters: what is longer is no name that a price list has."""


def cost(span: Span) -> float | None:
    """US dollars of a `chat` span's call, at the price of its time; None where the package is not installed, knows no
    price, or the span has no numbers of tokens or is of a policy's call. Input that the provider had cached counts in
    full.

    Where the span has the client's URL, a model is looked up among those of that provider alone: a server of one's own
    may call a model by any name.
    """
    a = span.attributes
    calculate, tokens = _calculator(), (a.get(semconv.INPUT_TOKENS), a.get(semconv.OUTPUT_TOKENS))
    model = str(a.get(semconv.RESPONSE_MODEL) or a.get(semconv.REQUEST_MODEL) or "")
    known = model and all(isinstance(n, int) and n >= 0 for n in tokens)
    if calculate is None or not known or len(model) > LONGEST_NAME or a.get(semconv.ROUTED):
        return None
    url, provider = a.get(semconv.URL), a.get(semconv.PROVIDER_NAME)
    where = {"provider_api_url": str(url)} if url else {"provider_id": str(provider) if provider else None}
    try:
        return calculate(model, *tokens, datetime.fromtimestamp(span.start, UTC), **where)
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
    """(model, input tokens, output tokens, time, provider) -> dollars; None where the package is not installed."""
    try:
        from genai_prices import Usage, calc_price
    except ImportError:
        return None

    def calculate(model: str, n_input: int, n_output: int, at: datetime, **where: Any) -> float:
        usage = Usage(input_tokens=n_input, output_tokens=n_output)
        return float(calc_price(usage, model, genai_request_timestamp=at, **where).total_price)

    return calculate
