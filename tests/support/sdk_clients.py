"""The clients of the providers' SDKs, as an agent makes them; a test is skipped where their SDK is not installed."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import Attempt


def openai_client(attempt: Attempt) -> Any:
    """`AsyncOpenAI`."""
    pytest.importorskip("openai")
    return attempt.client()


def anthropic_client(attempt: Attempt, base_url: str | None = None) -> Any:
    """`AsyncAnthropic`."""
    anthropic = pytest.importorskip("anthropic")
    return anthropic.AsyncAnthropic(
        base_url=base_url or attempt.url().removesuffix("/v1"),
        api_key=attempt.key,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
        max_retries=0,
    )


def google_client(attempt: Attempt, base_url: str | None = None, **http_options: Any) -> Any:
    """The asynchronous client of google-genai."""
    genai = pytest.importorskip("google.genai")
    own = {"client_args": {"trust_env": False}, "async_client_args": {"trust_env": False}}
    options = {"base_url": base_url or attempt.url().removesuffix("/v1"), **own, **http_options}
    return genai.Client(api_key=attempt.key, http_options=options).aio
