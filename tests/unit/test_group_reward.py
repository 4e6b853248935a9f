"""A judge of groups in a run: real HTTP on both sides, a scripted policy, and whatever can go wrong in between."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import say
from scripted import Asked, ScriptedRollouts, quick_tokenizer

import agl
from agl.errors import JudgeError, RewardError
from agl.rewards import RankJudge
from agl.testing.provider import Provider, Reply, serve
from agl.trainer.store import open_store

RUN = re.compile(r"^#\w+ run \d+\n(.*?)\n(?=#\w+ (?:run|end))", re.M | re.S)
WORDS = ["one", "three", "seventeen", "two"]


@agl.rollout
def agent(task: Any, llm: agl.LLM) -> None:
    say(llm, task["question"])


def words(body: dict[str, Any]) -> list[str]:
    """The answers that the judge is shown."""
    return [run.rpartition("assistant: ")[2] for run in RUN.findall(body["messages"][0]["content"])]


def longest_is_best(body: dict[str, Any]) -> Reply:
    """Scores answers by their length; ignores an answer's place."""
    scores = {i: min(10, len(word)) for i, word in enumerate(words(body), 1)}
    return Reply(json.dumps({"reason": "long", "scores": scores}))


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(longest_is_best) as server:
        yield server


def judge(provider: Provider, **options: Any) -> RankJudge:
    return RankJudge("judge-model", base_url=provider.url, api_key="sk-judge", **options)


def in_turn() -> Any:
    """A policy that answers each task with `WORDS`, again and again."""
    left: dict[str, Iterator[str]] = {}

    def answer(asked: Asked) -> str:
        task = quick_tokenizer().decode(asked.prompt_ids.tolist())
        return next(left.setdefault(task, itertools.cycle(WORDS)))

    return answer


def fit(provider: Provider, directory: Path, tasks: int = 3, *, who: Any = agent, **options: Any) -> ScriptedRollouts:
    algorithm = ScriptedRollouts(in_turn(), group_size=4)
    settings = {"n_workers": 4, "progress": False, "group_reward": judge(provider), **options}
    trainer = agl.Trainer(algorithm, directory=directory, **settings)  # type: ignore[arg-type]
    trainer.fit(who, [{"question": f"question {i}"} for i in range(tasks)])
    return algorithm


def stored(directory: Path) -> list[tuple[str, str, list[tuple[str, float, str]]]]:
    """(group, the answer, its rewards) of every rollout in the store."""

    async def look() -> list[Any]:
        store = await open_store(f"sqlite:///{directory / 'run.db'}")
        try:
            found = []
            for rollout in await store.query_rollouts():
                calls = await store.query_calls(rollout.rollout_id, rollout.attempts)
                rewards = [
                    (
                        s.attributes["agl.reward.name"],
                        s.attributes["agl.reward.value"],
                        s.attributes["agl.reward.source"],
                    )
                    for s in await store.query_spans(rollout.rollout_id, rollout.attempts)
                    if s.operation == "reward"
                ]
                found.append((rollout.group, calls[0].response.get("content", "") if calls else "", rewards))
            return found
        finally:
            await store.close()

    return asyncio.run(look())


def test_every_rollout_has_its_score_in_training_and_in_the_store(provider: Provider, tmp_path: Path) -> None:
    algorithm = fit(provider, tmp_path)
    said = [calls[0].response["content"] for calls in algorithm.calls]
    assert sorted(said) == sorted(WORDS * 3)
    assert algorithm.rewards == pytest.approx([len(word) / 10 for word in said])
    for _, word, rewards in stored(tmp_path):
        assert rewards == [("rank", pytest.approx(len(word) / 10), "group")]
    for trajectory, calls in zip(algorithm.trajectories, algorithm.calls, strict=True):
        assert [r.name for r in trajectory.rewards] == ["rank"]
        assert len(calls) == len(trajectory.transitions) == 1  # the judge's calls are nobody's
    assert len(provider.seen) == 6  # three groups, two votes
    for seen in provider.seen:
        assert seen.headers["authorization"] == "Bearer sk-judge"
        assert "traceparent" not in seen.headers
        assert "agl-" not in seen.text
        assert sorted(words(seen.body)) == sorted(WORDS)
        [text] = {m["content"] for m in seen.body["messages"]}
        assert text.count("| user: question") == 1  # what all were asked


def test_its_score_is_added_to_the_agents_own_rewards(provider: Provider, tmp_path: Path) -> None:
    def answer(task: Any) -> str:
        import openai

        client = openai.OpenAI(base_url="http://127.0.0.1:9", api_key="none")
        said = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
        return said.choices[0].message.content or ""

    def short(task: Any, output: str) -> dict[str, float]:
        return {"reward": 0.25 * (len(output) < 4), "letters": len(output)}

    algorithm = fit(provider, tmp_path, 1, who=agl.wrap(answer, reward=short))
    for trajectory, calls in zip(algorithm.trajectories, algorithm.calls, strict=True):
        word = calls[0].response["content"]
        assert trajectory.final_reward == pytest.approx(len(word) / 10 + 0.25 * (len(word) < 4))
        assert [r.name for r in trajectory.rewards] == ["reward", "letters", "rank"]
    assert all("final output" not in seen.body["messages"][0]["content"] for seen in provider.seen)


def test_a_group_that_is_never_scored_is_dropped_and_reported(
    provider: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another group's answer is malformed once, and is asked for again."""
    turns = itertools.count()

    def script(body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        if "question 1" in text or ("question 2" in text and next(turns) == 0):
            return Reply("They are all lovely.")
        return longest_is_best(body)

    provider.script = script
    algorithm = fit(provider, tmp_path, progress=True)
    assert len(algorithm.rewards) == 8
    assert None not in algorithm.rewards
    said = capsys.readouterr().err
    told = " ".join(said.split())
    assert said.count("a group is dropped") == 1
    assert "no score for each of 4 runs" in told
    assert "group=train-0-1" in told
    assert "They are all lovely." in told
    for group, _, rewards in stored(tmp_path):
        assert len(rewards) == (0 if group == "train-0-1" else 1)

    provider.script = lambda body: Reply("no")
    with pytest.raises(
        RewardError, match="all 8 rollouts of the run failed; the first: the judge 'judge-model' gave no"
    ):
        fit(provider, tmp_path / "none", 2)


def test_a_judge_that_is_down_ends_the_run_and_says_what_to_do(tmp_path: Path, provider: Provider) -> None:
    down = RankJudge("m", base_url="http://127.0.0.1:9/v1", api_key="k", retries=0)
    with pytest.raises(JudgeError, match="did not answer: APIConnectionError") as caught:
        fit(provider, tmp_path, group_reward=down)
    assert "is its endpoint up" in str(caught.value)
    assert "Then resume" in str(caught.value)
    assert all(not rewards for _, _, rewards in stored(tmp_path))


def test_what_failed_is_not_shown_and_a_group_without_success_is_not_asked_about(
    provider: Provider, tmp_path: Path
) -> None:
    @agl.rollout
    def fragile(task: Any, llm: agl.LLM) -> None:
        if say(llm, task["question"]) in ("two", *task["wrong"]):
            raise ValueError("wrong")

    algorithm = ScriptedRollouts(in_turn(), group_size=4)
    trainer = agl.Trainer(
        algorithm, directory=tmp_path, n_workers=1, max_attempts=1, progress=False, group_reward=judge(provider)
    )
    trainer.fit(fragile, [{"question": "a", "wrong": []}, {"question": "b", "wrong": WORDS}])
    assert algorithm.rewards == pytest.approx([0.3, 0.5, 0.9])
    assert len(provider.seen) == 2


def test_a_class_of_ones_own(provider: Provider, tmp_path: Path) -> None:
    class Shortest:
        label = "shortest"

        async def score(self, task: Any, traces: Any) -> list[dict[str, float]]:
            lengths = [len(trace.conversation[-1][1]["content"]) for trace in traces]
            return [{"reward": float(x == min(lengths)), "letters": x} for x in lengths]

    algorithm = fit(provider, tmp_path, 1, group_reward=Shortest())
    for trajectory, calls in zip(algorithm.trajectories, algorithm.calls, strict=True):
        word = calls[0].response["content"]
        named = {r.name: (r.value, r.primary) for r in trajectory.rewards}
        assert named == {"shortest": (float(len(word) == 3), True), "letters": (len(word), False)}
    assert not provider.seen


def test_groups_are_scored_while_others_run_and_a_bound_holds(provider: Provider, tmp_path: Path) -> None:
    running = most = 0
    first = True

    class Slow(RankJudge):
        async def ask_async(self, question: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            return await super().ask_async(question)

    rank = Slow("m", base_url=provider.url, api_key="k", votes=4, concurrency=3)
    answer = in_turn()

    def script(asked: Asked) -> str:
        nonlocal first
        if first and provider.seen:
            first = False
        return answer(asked)

    algorithm = ScriptedRollouts(script, group_size=4)
    trainer = agl.Trainer(algorithm, directory=tmp_path, n_workers=2, progress=False, group_reward=rank)
    trainer.fit(agent, [{"question": f"question {i}"} for i in range(8)])
    assert not first  # the policy was still asked after the judge had been
    assert most == 3
    assert len(provider.seen) == 32
