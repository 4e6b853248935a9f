"""Weighted sums, and reward functions that see the trace, in training as `explain` shows it."""

from __future__ import annotations

import asyncio
import math
import pickle
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl
from agl import semconv, tracing
from agl.agents.agent import RolloutInfo, scored
from agl.errors import ConfigError, RewardError
from agl.mdp.selection import select
from agl.rewards import Contains, ExactMatch, FuzzyMatch, RegexMatch, TokenF1, ToolSuccess, Trace, Weighted
from agl.testing.provider import Reply, serve
from agl.trainer.store import open_store

TASK = {"answer": "the cat"}


def test_a_sum_reports_its_parts() -> None:
    grader = 0.8 * ExactMatch() + 0.2 * RegexMatch("#").named("format")
    assert grader(TASK, "the cat #") == {"reward": 0.2, "exact_match": 0.0, "format": 1.0}
    assert grader(TASK, "The cat") == {"reward": 0.8, "exact_match": 1.0, "format": 0.0}
    assert grader.range == (0.0, 1.0)
    assert Weighted({"a": (2, ExactMatch()), "b": (-1, ToolSuccess(failure=-1))}).range == (-1, 3)
    assert Weighted({"f": (1, lambda task, output: 0.0)}).range == (-math.inf, math.inf)


def test_the_same_grader_twice_has_two_names() -> None:
    grader = ExactMatch() + ExactMatch(ignore_case=False) + 0.5 * (TokenF1() + TokenF1())
    assert list(grader.parts) == ["exact_match", "exact_match_2", "token_f1", "token_f1_2"]
    assert [weight for weight, _ in grader.parts.values()] == [1.0, 1.0, 0.5, 0.5]


def test_functions_nested_sums_and_clipping() -> None:
    inner = 0.5 * ExactMatch() + 0.5 * TokenF1()
    grader = Weighted(
        {
            "quality": (1.0, inner),
            "short": (-0.1, lambda task, output: len(output)),
            "both": (1.0, lambda task, output: {"reward": 0.25, "other": 7}),
        },
        clip=(-1, 1),
    )
    assert grader(TASK, "cat") == pytest.approx(
        {
            "reward": 0.5 - 0.3 + 0.25, "quality": 0.5, "quality.exact_match": 0.0, "quality.token_f1": 1.0,
            "short": 3, "both": 0.25, "both.other": 7,
        }
    )  # fmt: skip
    assert grader(TASK, "x" * 100)["reward"] == -1
    assert grader.range == (-1, 1)


@given(
    st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=2),
    st.text("abc the", max_size=9),
    st.floats(-3, 3),
)
def test_a_sum_is_linear_and_within_its_range(weights: list[float], output: str, factor: float) -> None:
    grader = weights[0] * TokenF1() + weights[1] * FuzzyMatch()
    value = grader(TASK, output)
    assert value["reward"] == pytest.approx(weights[0] * value["token_f1"] + weights[1] * value["fuzzy_match"])
    low, high = grader.range
    assert low - 1e-9 <= value["reward"] <= high + 1e-9
    assert (factor * grader)(TASK, output)["reward"] == pytest.approx(factor * value["reward"], abs=1e-9)


def test_bad_sums() -> None:
    for parts in (
        {},
        {"a": ExactMatch()},
        {"a": (1,)},
        {"a": ("1", len)},
        {"a": (math.nan, len)},
        {"reward": (1, len)},
    ):
        with pytest.raises(ConfigError):
            Weighted(parts)
    with pytest.raises(ConfigError, match="clipped"):
        Weighted({"a": (1, ExactMatch())}, clip=(0, 1)) * 2
    with pytest.raises(RewardError, match="the part 'a': the reward 'reward' is nan"):
        Weighted({"a": (1, lambda task, output: math.nan)})(TASK, "x")
    with pytest.raises(RewardError, match="cannot tell which of x, y"):
        Weighted({"a": (1, lambda task, output: {"x": 1, "y": 2})})(TASK, "x")


def test_a_sum_with_an_async_part_is_awaited() -> None:
    async def slow(task: Any, output: Any, trace: Trace | None) -> float:
        await asyncio.sleep(0)
        return 0.5

    grader = ExactMatch() + Weighted({"slow": (2, slow)})
    assert grader.is_async
    assert asyncio.run(grader.call_async(TASK, "the cat")) == {"reward": 2.0, "exact_match": 1.0, "slow": 0.5}
    with pytest.raises(RewardError, match="the part 'slow' of weighted is async"):
        grader(TASK, "the cat")
    with pytest.raises(ConfigError, match="is sync but its reward function is async"):
        scored("a", lambda task: task, grader)


def test_a_sum_can_be_copied() -> None:
    grader = 0.8 * ExactMatch(answer="answer") + 0.2 * RegexMatch("x")
    assert pickle.loads(pickle.dumps(grader))(TASK, "the cat") == grader(TASK, "the cat")


# -- the trace ----------------------------------------------------------------------------------------------------


def named(task: Any, output: Any, trace: Any) -> int:
    return len(trace.tools)


def annotated(task: Any, output: Any, what: Trace) -> int:
    return len(what.tools)


def optional(task: Any, output: Any, *, what: Trace | None = None) -> int:
    return len(what.tools) if what is not None else -1


async def named_async(task: Any, output: Any, trace: Any) -> int:
    return len(trace.tools)


class Callable:
    def __call__(self, task: Any, output: Any, trace: Any) -> int:
        return len(trace.tools)


def plain(task: Any, output: Any, other: int = 2) -> int:
    return other


@pytest.mark.parametrize("reward", [named, annotated, optional, Callable(), named_async, plain])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_function_gets_the_trace_if_it_asks(reward: Any, is_async: bool) -> None:
    def work(task: Any) -> str:
        for name in ("a", "b"):
            with tracing.span(semconv.EXECUTE_TOOL, name):
                pass
        return "done"

    async def work_async(task: Any) -> str:
        return work(task)

    if reward is named_async and not is_async:
        with pytest.raises(ConfigError, match="is sync but its reward function is async"):
            scored("worker", work, reward)
        return
    agent = scored("worker", work_async if is_async else work, reward)
    with tracing.running(tracing.RolloutContext("ro", 1, "worker", select(None))):
        result: Any = agent.run("task", {}, RolloutInfo("ro", 1))
        outcome = asyncio.run(_await(result)) if is_async else result
    assert (outcome.reward, outcome.output) == (2, "done")


async def _await(value: Any) -> Any:
    return await value


def test_an_argument_that_nothing_can_be_given_for_is_refused() -> None:
    def wrong(task: Any, output: Any, spans: Any) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="the reward function 'wrong' has an argument 'spans'"):
        scored("a", lambda task: task, wrong)


@pytest.mark.slow
def test_explain_shows_every_part(untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way: a trained agent, a sum with a grader of the trace, the store, and the report."""

    def ask(task: Any) -> str:
        with tracing.span(semconv.EXECUTE_TOOL, "look", attributes={semconv.TOOL_NAME: "look"}):
            pass
        client = openai.OpenAI(base_url=provider.url, api_key="sk-original")
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
        return answer.choices[0].message.content or ""

    with serve(lambda body: Reply("never asked")) as provider:
        grader = 0.9 * Contains(whole_words=False) + 0.1 * ToolSuccess()
        trainer = agl.Trainer(
            agl.GRPO(model=str(untrained_model), group_size=4, batch_size=1, steps=1, max_response_tokens=8),
            directory=tmp_path,
            progress=False,
        )
        result = trainer.fit(agl.wrap(ask, reward=grader), [{"question": "one", "answer": "a"}])
        assert provider.seen == []

    async def rollout_ids() -> list[str]:
        store = await open_store(result.store)
        try:
            return [r.rollout_id for r in await store.query_rollouts(mode="train")]
        finally:
            await store.close()

    ids = asyncio.run(rollout_ids())
    assert len(ids) == 4
    for rollout_id in ids:
        report = agl.explain(rollout_id, result.store)
        names = {r.name: r.primary for r in report.rewards}
        assert names == {"reward": True, "contains": False, "tool_success": False}
        values = {r.name: r.value for r in report.rewards}
        assert values["tool_success"] == 1.0
        assert report.total_reward == values["reward"] == pytest.approx(0.9 * values["contains"] + 0.1)
    shown = capsys.readouterr().out
    assert "contains" in shown
    assert "tool_success 1" in shown
