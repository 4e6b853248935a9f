"""What calls of other models cost, against prices that their providers have published."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

import agl
from agl import semconv
from agl.mdp.spans import Span
from agl.testing.provider import Reply, serve
from agl.trainer.report import prices
from agl.trainer.report.rollout_report import describe
from agl.trainer.store.location import read_store

MAY_2025 = 1_746_100_000.0


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


@pytest.mark.parametrize(
    "span",
    [
        chat("policy", 10, 10),
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
