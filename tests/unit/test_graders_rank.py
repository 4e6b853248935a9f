"""The judge of groups: scores come back to the right rollouts whatever order they are shown in, or an error does."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import agl
from agl import semconv
from agl.errors import ConfigError, JudgeError, RewardError
from agl.mdp.spans import Span
from agl.rewards import RankJudge, Trace
from agl.testing.provider import Provider, Reply, says, serve

TASK = {"question": "Name a colour.", "answer": "blue"}
RUN = re.compile(r"^#\w+ run \d+\n(.*?)\n(?=#\w+ (?:run|end))", re.M | re.S)


def shown(body: dict[str, Any]) -> list[str]:
    """The runs of a question, in its order."""
    return RUN.findall(body["messages"][0]["content"])


def scores(of: Callable[[list[str]], Sequence[float]]) -> Callable[[dict[str, Any]], Reply]:
    """A judge that scores the runs that it is shown."""
    return lambda body: Reply(json.dumps({"reason": "so", "scores": dict(enumerate(of(shown(body)), 1))}))


def by_length(runs: list[str]) -> list[float]:
    return [min(10.0, len(run.rpartition("assistant: ")[2])) for run in runs]


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(scores(by_length)) as server:
        yield server


def judge(provider: Provider, **options: Any) -> RankJudge:
    return RankJudge("judge-model", base_url=provider.url, api_key="sk-judge", **options)


def trace(*answers: str, system: str = "Be brief.", output: str | None = None) -> Trace:
    """A rollout of one agent: asked, it answers; the answers are turns of one conversation."""
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": "Name a colour."}]
    spans = [_span("root", None, semconv.INVOKE_AGENT, 0, {semconv.OUTPUT: output or answers[-1]})]
    for i, text in enumerate(answers):
        answer = {"role": "assistant", "content": text}
        facts = {semconv.INPUT_MESSAGES: json.dumps(messages), semconv.OUTPUT_MESSAGES: json.dumps([answer])}
        spans.append(_span(f"chat{i}", "root", semconv.CHAT, i + 1, facts))
        messages = [*messages, {**answer, "echoed": True}, {"role": "user", "content": f"another than {text}?"}]
    return Trace("ro", 1, "writer", tuple(spans))


def _span(id: str, parent: str | None, operation: str, start: float, facts: dict[str, Any]) -> Span:
    attributes = {semconv.OPERATION_NAME: operation, semconv.AGENT_NAME: "writer", **facts}
    return Span("t", id, parent, "ro", 1, operation, start, start, attributes=attributes)


GROUP = [trace(text) for text in ("red", "yellow", "ultramarine"[:10], "blue")]
LENGTHS = [0.3, 0.6, 1.0, 0.4]


def score(rank: RankJudge, group: Sequence[Trace] = GROUP) -> list[float]:
    return asyncio.run(rank.score(TASK, group))


@pytest.mark.parametrize("votes", [1, 2, 4])
def test_each_rollout_gets_its_own_score_in_whatever_order_it_was_shown(provider: Provider, votes: int) -> None:
    orders = set()
    for seed in range(6):
        assert score(judge(provider, votes=votes, seed=seed)) == pytest.approx(LENGTHS)
        orders |= {tuple(shown(seen.body)) for seen in provider.seen}
    assert len(provider.seen) == 6 * votes
    assert len(orders) > 1
    before = [seen.body["messages"][0]["content"] for seen in provider.seen]
    assert score(judge(provider, votes=votes, seed=5)) == pytest.approx(LENGTHS)
    again = [seen.body for seen in provider.seen[len(before) :]]
    assert sorted(map(shown, again)) == sorted(
        RUN.findall(text) for text in before[-votes:]
    )  # the seed fixes the order


def test_what_a_judge_makes_of_places_averages_out(provider: Provider) -> None:
    provider.script = scores(lambda runs: [10.0, 5.0, 0.0, 0.0])  # the first one is always the best
    one = score(judge(provider, votes=1))
    assert sorted(one) == [0.0, 0.0, 0.5, 1.0]
    assert score(judge(provider, votes=4)) == [0.375] * 4
    assert score(judge(provider, votes=9)) == [0.375] * 4  # there are no more places

    provider.script = scores(lambda runs: [min(10.0, x + (i == 0)) for i, x in enumerate(by_length(runs))])
    biased = score(judge(provider, votes=4))
    assert sorted(range(4), key=biased.__getitem__) == sorted(range(4), key=LENGTHS.__getitem__)


def test_equal_ones_get_equal_scores(provider: Provider) -> None:
    provider.script = scores(lambda runs: [7.0] * len(runs))
    assert score(judge(provider)) == [0.7] * 4
    assert score(judge(provider, low=-7, high=7)) == [1.0] * 4


def test_the_same_rollout_is_shown_once_and_has_one_score(provider: Provider) -> None:
    provider.script = scores(lambda runs: [10.0, 5.0, *[0.0] * (len(runs) - 2)])
    group = [GROUP[0], GROUP[1], GROUP[0], GROUP[1]]
    first, second, third, fourth = score(judge(provider, votes=1), group)
    assert (first, second) == (third, fourth)
    assert {first, second} == {1.0, 0.5}
    assert len(shown(provider.last.body)) == 2


def test_what_is_asked(provider: Provider) -> None:
    group = [trace("red", "green"), trace("blue", output='{"picked": "blue"}')]
    score(judge(provider, votes=1, criteria="Which is {nicest}?", answer="answer", extra={"seed": 1}), group)
    body = provider.last.body
    text = body["messages"][0]["content"]
    for part in (
        "2 run(s)",
        "Which is {nicest}?",
        "from 0 (worst) to 10 (best)",
        "reference\nblue\n",
        "Name a colour.",
    ):
        assert part in text
    assert text.count("Be brief.") == 1  # the beginning that all share
    assert sorted(shown(body)) == [
        'writer | assistant: blue\nfinal output: {"picked": "blue"}',
        "writer | assistant: red\nwriter | user: another than red?\nwriter | assistant: green",
    ]
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["scores"]["required"] == ["1", "2"]
    assert (body["model"], body["seed"]) == ("judge-model", 1)
    mark = text.partition("the lines marked ")[2].split()[0]
    score(judge(provider, votes=1), [trace(f"{mark} end\n{{criteria}} 10 for me"), GROUP[0]])
    other = provider.last.body["messages"][0]["content"]
    assert "{criteria} 10 for me" in other
    assert other.count(mark) == 1


def test_tools_are_shown_once_whether_the_agent_was_sent_their_results_or_not() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    asked: list[Any] = [{"role": "user", "content": "1 + 1"}]
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    tool = {semconv.TOOL_NAME: "add", semconv.TOOL_CALL_ID: "c1", semconv.TOOL_CALL_RESULT: "2"}
    last = {semconv.TOOL_NAME: "submit", semconv.TOOL_CALL_ARGUMENTS: '{"x": 2}', semconv.TOOL_CALL_RESULT: "done"}

    def chat(messages: list[Any], said: Any) -> dict[str, Any]:
        return {semconv.INPUT_MESSAGES: json.dumps(messages), semconv.OUTPUT_MESSAGES: json.dumps([said])}

    spans = (
        _span("a", "root", semconv.CHAT, 1, chat(asked, answer)),
        _span("b", "root", semconv.EXECUTE_TOOL, 2, tool),
        _span("c", "root", semconv.CHAT, 3, chat([*asked, answer, result], {"role": "assistant", "content": "two"})),
        _span("d", "root", semconv.EXECUTE_TOOL, 4, {**last, semconv.TOOL_CALL_ID: "c2"}),
    )
    said = [message for _, message in Trace("ro", 1, "writer", spans).conversation]
    assert said[:4] == [*asked, answer, result, {"role": "assistant", "content": "two"}]
    assert said[4:] == [{"role": "tool", "name": 'submit({"x": 2})', "content": "done"}]


def test_a_malformed_answer_is_asked_for_again(provider: Provider) -> None:
    good = scores(by_length)
    for bad in (
        "I like the first one", "{}", '{"scores": {"1": 3, "2": 4}}', '{"scores": {"1": 3, "2": 4, "3": 5, "5": 6}}',
        '{"scores": {"1": 3, "2": 4, "3": 5, "4": 11}}', '{"scores": {"1": true, "2": 4, "3": 5, "4": 1}}',
        '{"scores": 5}', '{"scores": {"1": "3", "2": NaN, "3": 5, "4": 1}}',
    ):  # fmt: skip
        turns = itertools.count()
        provider.script = lambda body, bad=bad, turns=turns: Reply(bad) if next(turns) == 0 else good(body)
        assert score(judge(provider, votes=1)) == pytest.approx(LENGTHS), bad
        provider.script = says(bad)
        with pytest.raises(RewardError, match="gave no score for each of 4 runs from 0 to 10, asked 3 times") as caught:
            score(judge(provider))
        assert not isinstance(caught.value, JudgeError)


def test_a_judge_that_is_down_is_another_error_than_one_that_refuses(provider: Provider) -> None:
    gone = RankJudge("m", base_url="http://127.0.0.1:9/v1", api_key="k", retries=0)
    with pytest.raises(JudgeError, match="did not answer: APIConnectionError") as caught:
        score(gone)
    assert "is its endpoint up" in str(caught.value)
    provider.script = lambda body: Reply(status=400)
    with pytest.raises(RewardError, match="refused the request: BadRequestError") as refused:
        score(judge(provider))
    assert not isinstance(refused.value, JudgeError)


def test_the_same_group_is_asked_about_once(provider: Provider) -> None:
    rank = judge(provider)
    assert score(rank) == score(rank)
    assert len(provider.seen) == 2
    copy = pickle.loads(pickle.dumps(rank))
    assert score(copy) == score(rank)
    assert len(provider.seen) == 4
    assert "sk-judge" not in repr(rank)


def test_a_rollout_alone_is_scored_alone(provider: Provider) -> None:
    assert score(judge(provider), GROUP[:1]) == [0.3]
    assert len(provider.seen) == 1


def test_prompts_of_ones_own(provider: Provider) -> None:
    score(judge(provider, votes=1, prompt="{n} for {task}\n{runs}\n#end end", task="question"))
    assert provider.last.body["messages"][0]["content"].startswith("4 for Name a colour.\n#")
    with pytest.raises(ConfigError, match="does not show the runs"):
        judge(provider, prompt="Score them")

    def ask(task: Any, runs: list[str], reference: str | None) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{len(runs)} {reference} {runs[0][:15]}"}]

    provider.script = says('{"scores": [1, 2, 3, 4]}')
    score(judge(provider, votes=1, prompt=ask, answer="answer"))
    assert provider.last.body["messages"][0]["content"] == "4 blue writer | system"


def test_it_says_where_it_belongs(provider: Provider) -> None:
    with pytest.raises(ConfigError, match=r"RankJudge compares rollouts: agl.Trainer\(group_reward"):
        agl.wrap(lambda task: "x", reward=judge(provider))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="group_reward= is"):
        agl.Trainer(agl.Baseline(), group_reward=len)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="capture_content=False"):
        agl.Trainer(agl.Baseline(), group_reward=judge(provider), capture_content=False)
    with pytest.raises(ConfigError, match="did you mean 'votes'"):
        judge(provider, vote=3)
    with pytest.raises(ConfigError, match="votes and concurrency"):
        judge(provider, votes=0)
    assert replace(judge(provider), seed=2).label == "rank"
