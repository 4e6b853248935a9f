"""A LangChain agent answers generated questions of reasoning-gym: sums of two numbers, and needles in haystacks."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from examples.common import Endpoint

KINDS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "needle_haystack": {"min_num_statements": 5, "max_num_statements": 10},
}
"""The questions of reasoning-gym that are asked, with their sizes."""


def build(endpoint: Endpoint) -> Any:
    """An agent without tools: a question, an answer."""
    model = ChatOpenAI(
        model=endpoint.model, base_url=endpoint.url, api_key=SecretStr(endpoint.key), max_completion_tokens=24
    )
    return create_agent(model, [], system_prompt="Give the answer alone.", name="solver")
