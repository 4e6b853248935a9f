"""What calls of other models cost, against prices that their providers have published."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import genai_prices
import httpx
import pytest
from genai_prices import calc_price
from late import Late
from openai import OpenAI
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

import agl
from agl import semconv
from agl.mdp.spans import Span
from agl.testing.provider import Reply, serve
from agl.tracing.provider_formats import ResponseAccumulator
from agl.tracing.usage import usage_facts
from agl.trainer.report import prices
from agl.trainer.report.rollout_report import describe
from agl.trainer.store.location import read_store

google_types: Any = Late("google.genai.types")
MAY_2025 = 1_746_100_000.0
FEBRUARY_2026 = 1_770_000_000.0


def chat(model: str, n_input: Any, n_output: Any, **attributes: Any) -> Span:
    known = {semconv.REQUEST_MODEL: model, semconv.INPUT_TOKENS: n_input, semconv.OUTPUT_TOKENS: n_output}
    return Span("0" * 32, "0" * 16, None, "r", 1, "chat", MAY_2025, MAY_2025 + 1, attributes=known | attributes)


@pytest.mark.parametrize(
    ("model", "provider", "per_million"),
    [
        ("gpt-4o-2024-08-06", "openai", (2.50, 10.00)),
        ("gpt-4o-mini", "openai", (0.15, 0.60)),
        ("claude-3-5-haiku-20241022", "anthropic", (0.80, 4.00)),
    ],
)
def test_a_call_costs_what_its_provider_asks(model: str, provider: str, per_million: tuple[float, float]) -> None:
    span = chat(model, 12_000, 500, **{semconv.PROVIDER_NAME: provider})
    assert prices.cost(span) == pytest.approx((12_000 * per_million[0] + 500 * per_million[1]) / 1e6)


_OPENAI = {"gpt-4o-2024-08-06": (2.50, 1.25, 10.00), "o3": (2.00, 0.50, 8.00)}
"""Dollars per million tokens: input, cached input, output."""
_ANTHROPIC = {"claude-sonnet-4-5": (3.00, 0.30, 3.75, 6.00, 15.00)}
"""Input, read from the cache, written to it for five minutes, for an hour, output."""


def _bills() -> Iterator[tuple[str, dict[str, Any], str, float]]:
    """Provider, an answer's body, its model, and what it costs by the provider's page of prices."""
    for model, (of_input, of_cached, of_output) in _OPENAI.items():
        for cached, reasoning in ((0, 0), (8_000, 0), (8_000, 300), (12_000, 500)):
            dollars = ((12_000 - cached) * of_input + cached * of_cached + 500 * of_output) / 1e6
            chat_usage = {
                "prompt_tokens": 12_000, "completion_tokens": 500, "total_tokens": 12_500,
                "prompt_tokens_details": {"cached_tokens": cached},
                "completion_tokens_details": {"reasoning_tokens": reasoning},
            }  # fmt: skip
            usage = {
                "input_tokens": 12_000, "output_tokens": 500, "total_tokens": 12_500,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens_details": {"reasoning_tokens": reasoning},
            }  # fmt: skip
            yield "openai", {"model": model, "choices": [], "usage": chat_usage}, model, dollars
            yield "openai", {"model": model, "output": [], "usage": usage}, model, dollars
    for model, (of_input, of_read, of_written, of_hour, of_output) in _ANTHROPIC.items():
        for read, written, hour in ((0, 0, 0), (9_000, 0, 0), (9_000, 2_000, 0), (0, 2_000, 1_500)):
            tokens = ((1_000, of_input), (read, of_read), (written - hour, of_written), (hour, of_hour))
            usage = {
                "input_tokens": 1_000, "cache_read_input_tokens": read, "cache_creation_input_tokens": written,
                "cache_creation": {"ephemeral_5m_input_tokens": written - hour, "ephemeral_1h_input_tokens": hour},
                "output_tokens": 500,
            }  # fmt: skip
            body = {"type": "message", "model": model, "content": [], "usage": usage}
            yield "anthropic", body, model, (sum(n * price for n, price in tokens) + 500 * of_output) / 1e6
    for cached, thoughts in ((0, 0), (8_000, 0), (8_000, 400)):
        usage = {
            "promptTokenCount": 12_000, "cachedContentTokenCount": cached,
            "candidatesTokenCount": 500 - thoughts, "thoughtsTokenCount": thoughts, "totalTokenCount": 12_500,
        }  # fmt: skip
        dollars = ((12_000 - cached) * 0.30 + cached * 0.03 + 500 * 2.50) / 1e6
        body = {"modelVersion": "gemini-2.5-flash", "candidates": [], "usageMetadata": usage}
        yield "google", body, "gemini-2.5-flash", dollars


def _bills_of_bedrock() -> Iterator[tuple[str, dict[str, Any], str, float]]:
    """Likewise of Bedrock's Converse, whose input excludes cached tokens."""
    model = "global.anthropic.claude-sonnet-4-5-20250929-v1:0"
    for read, written in ((0, 0), (9_000, 0), (9_000, 2_000)):
        dollars = (1_000 * 3.00 + read * 0.30 + written * 3.75 + 500 * 15.00) / 1e6
        cached = {"cacheReadInputTokens": read, "cacheWriteInputTokens": written}
        for total in ({}, {"totalTokens": 1_500 + read + written}):
            usage = {"inputTokens": 1_000, "outputTokens": 500, **cached, **total}
            yield "aws.bedrock", {"model": model, "usage": usage}, model, dollars


def _bills_of_kinds() -> Iterator[tuple[str, dict[str, Any], str, float]]:
    """Likewise of answers with sound, pictures and searches. Dollars per million tokens: text, sound, pictures."""
    usage: dict[str, Any] = {
        "prompt_tokens": 1_000, "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 800},
        "completion_tokens": 100, "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 70},
    }  # fmt: skip
    dollars = (200 * 2.50 + 800 * 32.00 + 30 * 10.00 + 70 * 64.00) / 1e6
    yield "openai", {"model": "gpt-audio", "choices": [], "usage": usage}, "gpt-audio", dollars
    usage = {
        "promptTokenCount": 1_000, "candidatesTokenCount": 1_300,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 1_000}],
        "candidatesTokensDetails": [{"modality": "IMAGE", "tokenCount": 1_290}, {"modality": "TEXT", "tokenCount": 10}],
    }  # fmt: skip
    model = "gemini-2.5-flash-image"
    dollars = (1_000 * 0.30 + 10 * 2.50 + 1_290 * 30.00) / 1e6
    yield "google", {"modelVersion": model, "candidates": [], "usageMetadata": usage}, model, dollars
    for cached, of_sound in ((0, 0), (500, 300)):
        usage = {
            "promptTokenCount": 1_000, "cachedContentTokenCount": cached, "candidatesTokenCount": 10,
            "promptTokensDetails": [{"modality": "AUDIO", "tokenCount": 800}, {"modality": "TEXT", "tokenCount": 200}],
            "cacheTokensDetails": [{"modality": "AUDIO", "tokenCount": of_sound}],
        }  # fmt: skip
        text = (200 - (cached - of_sound)) * 0.30 + (cached - of_sound) * 0.03
        dollars = (text + (800 - of_sound) * 1.00 + of_sound * 0.10 + 10 * 2.50) / 1e6
        body = {"modelVersion": "gemini-2.5-flash", "candidates": [], "usageMetadata": usage}
        yield "google", body, "gemini-2.5-flash", dollars
    written = {"cache_creation_input_tokens": 100, "cache_creation": {"ephemeral_1h_input_tokens": 100}}
    compaction = {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3_500, **written}
    advice = {"type": "advisor_message", "model": "claude-opus-4-5", "input_tokens": 900, "output_tokens": 80}
    message = {"type": "message", "input_tokens": 23_000, "output_tokens": 1_000}
    for iterations, more in (
        ([message], 0.0),
        ([compaction, message], 180_000 * 3.00 + 100 * 6.00 + 3_500 * 15.00),
        ([message, advice], 900 * 5.00 + 80 * 25.00),
    ):
        usage = {"input_tokens": 23_000, "output_tokens": 1_000, "iterations": iterations}
        body = {"type": "message", "model": "claude-sonnet-4-5", "content": [], "usage": usage}
        yield "anthropic", body, "claude-sonnet-4-5", (23_000 * 3.00 + 1_000 * 15.00 + more) / 1e6
    usage = {"input_tokens": 1_000, "output_tokens": 100, "server_tool_use": {"web_search_requests": 3}}
    body = {"type": "message", "model": "claude-sonnet-4-5", "content": [], "usage": usage}
    yield "anthropic", body, "claude-sonnet-4-5", (1_000 * 3.00 + 100 * 15.00) / 1e6 + 3 * 10.00 / 1_000


@pytest.mark.parametrize(
    ("provider", "body", "model", "dollars"), [*_bills(), *_bills_of_bedrock(), *_bills_of_kinds()]
)
def test_cached_input_and_reasoning_cost_what_they_cost(
    provider: str, body: dict[str, Any], model: str, dollars: float
) -> None:
    answer = ResponseAccumulator()
    answer.whole(body)
    facts = answer.facts(content=False) | {semconv.PROVIDER_NAME: provider, semconv.REQUEST_MODEL: model}
    span = replace(chat(model, None, None), start=FEBRUARY_2026, attributes=facts)
    assert prices.cost(span) == pytest.approx(dollars)


_SOLD = {
    "openai": ("gpt-4o", "openai"),
    "gcp.gen_ai": ("gemini-2.5-flash", "google"),
    "gcp.vertex_ai": ("gemini-2.5-flash", "google"),
    "gcp.gemini": ("gemini-2.5-flash", "google"),
    "vertex_ai": ("gemini-2.5-flash", "google"),
    "gemini": ("gemini-2.5-flash", "google"),
    "anthropic": ("claude-sonnet-4-5", "anthropic"),
    "cohere": ("command-r", "cohere"),
    "az.ai.inference": ("DeepSeek-R1", "azure"),
    "az.ai.openai": ("gpt-4o-mini", "azure"),
    "azure.ai.inference": ("DeepSeek-R1", "azure"),
    "azure.ai.openai": ("gpt-4o-mini", "azure"),
    "aws.bedrock": ("anthropic.claude-sonnet-4-5-20250929-v1:0", "aws"),
    "perplexity": ("sonar", "perplexity"),
    "x_ai": ("grok-4", "x-ai"),
    "xai": ("grok-4", "x-ai"),
    "deepseek": ("deepseek-chat", "deepseek"),
    "groq": ("llama-3.3-70b-versatile", "groq"),
    "mistral_ai": ("mistral-large-latest", "mistral"),
    # Names that frameworks give.
    "azure_openai": ("gpt-4o-mini", "azure"),
    "AzureOpenAI": ("gpt-4o-mini", "azure"),
    "azure_ai": ("DeepSeek-R1", "azure"),
    "google-gla": ("gemini-2.5-flash", "google"),
    "google_vertexai": ("gemini-2.5-flash", "google"),
    "amazon_bedrock": ("anthropic.claude-sonnet-4-5-20250929-v1:0", "aws"),
    "grok": ("grok-4", "x-ai"),
    "mistralai": ("mistral-large-latest", "mistral"),
    "together_ai": ("meta-llama/Llama-3.3-70B-Instruct-Turbo", "together"),
}
"""A provider's name, OpenTelemetry's or a framework's -> a model that it sells, and its id in `genai-prices`."""
_CONVENTIONS = (*gen_ai_attributes.GenAiProviderNameValues, *gen_ai_attributes.GenAiSystemValues)


@pytest.mark.parametrize("provider", sorted({*_SOLD, *(each.value for each in _CONVENTIONS)}))
def test_every_provider_of_the_conventions_has_its_own_prices(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sold_by = _SOLD.get(provider, ("granite-4", None))
    asked: list[str] = []

    def noting(*args: Any, **options: Any) -> Any:
        calculated = calc_price(*args, **options)
        asked.append(calculated.provider.id)
        return calculated

    monkeypatch.setattr(genai_prices, "calc_price", noting)
    prices._calculator.cache_clear()
    price = prices.cost(replace(chat(model, 1_000, 10, **{semconv.PROVIDER_NAME: provider}), start=FEBRUARY_2026))
    prices._calculator.cache_clear()
    if sold_by is None:
        # The package lists no price of IBM's.
        assert (provider, price) == ("ibm.watsonx.ai", None)
        return
    assert asked == [sold_by]
    assert price is not None
    assert price > 0


_LANGCHAIN = {"cache_read": 8_000, "cache_creation": 1_000, "audio": 0}


@pytest.mark.parametrize(
    "usage",
    [
        pytest.param(usage, id=id)
        for id, usage in {
            "strands of bedrock": {
                "inputTokens": 3_000, "cacheReadInputTokens": 8_000, "cacheWriteInputTokens": 1_000,
                "outputTokens": 500, "totalTokens": 12_500,
            },
            "strands of openai": {
                "inputTokens": 12_000, "cacheReadInputTokens": 8_000, "cacheWriteInputTokens": 1_000,
                "outputTokens": 500, "totalTokens": 12_500,
            },
            "langchain": {"input_tokens": 12_000, "output_tokens": 500, "input_token_details": _LANGCHAIN},
            "agent framework": {
                "input_token_count": 12_000, "output_token_count": 500, "total_token_count": 12_500,
                "cache_read_input_token_count": 8_000, "cache_creation_input_token_count": 1_000,
            },
            "pydantic ai": {
                "input_tokens": 12_000, "output_tokens": 500, "cache_read_tokens": 8_000, "cache_write_tokens": 1_000,
            },
        }.items()
    ],
)  # fmt: skip
def test_the_objects_of_frameworks_are_counted_as_the_providers_are(usage: dict[str, Any]) -> None:
    assert usage_facts(usage) == {
        semconv.INPUT_TOKENS: 12_000,
        semconv.OUTPUT_TOKENS: 500,
        semconv.CACHE_READ_TOKENS: 8_000,
        semconv.CACHE_CREATION_TOKENS: 1_000,
    }


def test_googles_python_object_says_what_its_json_does() -> None:
    usage = {
        "promptTokenCount": 12_000, "cachedContentTokenCount": 8_000, "toolUsePromptTokenCount": 7,
        "candidatesTokenCount": 400, "thoughtsTokenCount": 100, "totalTokenCount": 12_507,
    }  # fmt: skip
    of_sdk = google_types.GenerateContentResponseUsageMetadata.model_validate(usage)
    assert usage_facts(of_sdk) == usage_facts(usage)
    assert usage_facts(of_sdk)[semconv.INPUT_TOKENS] == 12_007
    assert usage_facts(of_sdk)[semconv.OUTPUT_TOKENS] == 500


@pytest.mark.parametrize("besides", ["no JSON", "5", "[5]", "[{}]", '[{"gen_ai.usage.input_tokens": "x"}]'])
def test_iterations_that_cannot_be_read_make_the_price_unknown(besides: str) -> None:
    assert prices.cost(chat("gpt-4o", 10, 10, **{semconv.ITERATIONS: besides})) is None


@pytest.mark.parametrize(
    "span",
    [
        chat("policy", 10, 10),
        # More input was cached than there was.
        chat("gpt-4o", 10, 10, **{semconv.CACHE_READ_TOKENS: 11}),
        chat("gpt-4o", None, 10),
        chat("gpt-4o", 10, -1),
        chat("gpt-4o" * 100_000, 10, 10),
        replace(chat("gpt-4o", 10, 10), start=1e300),
        # A policy's, in whose place an agent asks for another model.
        chat("gpt-4o", 10, 10, **{semconv.URL: "https://api.openai.com/v1", semconv.ROUTED: True}),
        # A server of one's own, whatever it calls its model.
        chat("gpt-4o", 10, 10, **{semconv.URL: "http://127.0.0.1:8000/v1", semconv.PROVIDER_NAME: "openai"}),
    ],
)
def test_what_has_no_known_price_costs_nothing_known(span: Span) -> None:
    assert prices.cost(span) is None
    assert prices.total([span]) is None
    assert prices.total([span, chat("gpt-4o-mini", 1_000_000, 0)]) == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "$0.00"),
        (4.75e-5, "$0.000048"),
        (0.0031, "$0.0031"),
        (0.5, "$0.50"),
        (0.999, "$1.00"),
        (1234.5, "$1,234.50"),
    ],
)
def test_no_cost_is_shown_as_nothing(value: float, text: str) -> None:
    assert prices.dollars(value) == text


def test_without_the_package_no_price_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    prices._calculator.cache_clear()
    try:
        assert prices.cost(chat("gpt-4o-mini", 10, 1)) is None
    finally:
        prices._calculator.cache_clear()


def test_a_run_its_report_and_its_judge(tmp_path: Path) -> None:
    """An agent that asks gpt-4o twice and is scored by a judge: at OpenAI's address, which leads to a provider here."""
    with serve(lambda body: Reply("4")) as provider:

        def redirected(request: httpx.Request) -> httpx.Response:
            answer = httpx.post(f"{provider.url}/chat/completions", content=request.content)
            return httpx.Response(
                answer.status_code, content=answer.content, headers={"content-type": "application/json"}
            )

        client = OpenAI(api_key="k", http_client=httpx.Client(transport=httpx.MockTransport(redirected)))

        def ask() -> str:
            messages: Any = [{"role": "user", "content": "What is 2 + 2?"}]
            return client.chat.completions.create(model="gpt-4o", messages=messages).choices[0].message.content or ""

        def solver(task: str) -> str:
            ask()
            return ask()

        def judged(task: str, output: str) -> float:
            with agl.tracing.untrained("judge"):
                return float(ask() == output)

        trainer = agl.Trainer(agl.Baseline(repeats=2), directory=tmp_path, progress=False)
        agent = agl.wrap(solver, reward=judged)
        result = trainer.fit(agent, ["a", "b"])
        assert len(provider.seen) == 4 * 3
        evaluation = agl.evaluate(agent, ["a", "b"], directory=tmp_path / "evaluation", progress=False)
    per_call = (7 * 2.50 + 3 * 10.00) / 1e6
    [policy] = evaluation.policies.values()
    assert policy.means["cost_usd"] == pytest.approx(3 * per_call)
    shown = evaluation.save(tmp_path / "evaluation.md").read_text()
    assert "| cost per rollout | $0.00014 |" in shown
    assert result.history[-1]["train/cost_usd"] == pytest.approx(4 * 3 * per_call)

    async def reports(store: Any) -> list[Any]:
        return [await describe(store, r.rollout_id) for r in await store.query_rollouts()]

    for report in read_store(result.store, reports):
        assert report.cost == pytest.approx(3 * per_call) == report.to_json()["cost"]
        assert report.n_priced == len(report.provider_calls) == 3
