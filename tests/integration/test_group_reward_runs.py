"""A judge of groups where rollouts run elsewhere, in evaluations, in runs that are resumed, and in training."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from miniature import GAIN, gain, train
from running import say
from scripted import Asked, ScriptedRollouts, quick_tokenizer

import agl
from agl.errors import JudgeError
from agl.rewards import RankJudge
from agl.testing.provider import Reply, serve
from agl.trainer.quickstart.tasks import calculate
from agl.trainer.store import open_store

RUN = re.compile(r"^#\w+ run \d+\n(.*?)\n(?=#\w+ (?:run|end))", re.M | re.S)
WORDS = ["one", "three", "seventeen", "two"]
TASKS = [{"question": f"question {i}"} for i in range(3)]


def prefers(value: Callable[[str], float]) -> Callable[[dict[str, Any]], Reply]:
    """A judge that ranks the answers that it is shown by their value, ties alike."""

    def script(body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        values = [value(run.rpartition("assistant: ")[2]) for run in RUN.findall(text)]
        places = sorted(set(values))
        scores = {i: 10 * places.index(x) / max(1, len(places) - 1) for i, x in enumerate(values, 1)}
        return Reply(json.dumps({"reason": "so", "scores": scores}))

    return script


def judge(provider: Any, **options: Any) -> RankJudge:
    return RankJudge("judge-model", base_url=provider.url, api_key="sk-judge", **options)


@agl.rollout
def routed(task: Any, llm: agl.LLM) -> None:
    say(llm, task["question"])


def test_rollouts_in_other_processes_are_judged_where_the_trainer_is(tmp_path: Path) -> None:
    with serve(prefers(len)) as provider:
        left: dict[str, Iterator[str]] = {}

        def said_next(asked: Asked) -> str:
            task = quick_tokenizer().decode(asked.prompt_ids.tolist())
            return next(left.setdefault(task, itertools.cycle(WORDS)))

        algorithm = ScriptedRollouts(said_next, group_size=4)
        trainer = agl.Trainer(
            algorithm, directory=tmp_path, n_workers=2, progress=False, runners="process", group_reward=judge(provider)
        )
        trainer.fit(routed, TASKS)
        said = [calls[0].response["content"] for calls in algorithm.calls]
        assert algorithm.rewards == [{"one": 0.0, "two": 0.0, "three": 0.5, "seventeen": 1.0}[word] for word in said]
        assert len(provider.seen) == 6


def test_an_evaluation_on_an_agents_own_model_is_judged_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    left = itertools.cycle(WORDS)
    with serve(lambda body: Reply(next(left))) as model, serve() as provider:
        url = model.url

        def answer(task: Any) -> str:
            client = openai.OpenAI(base_url=url, api_key="sk-own")
            said = client.chat.completions.create(model="own", messages=[{"role": "user", "content": task["question"]}])
            return said.choices[0].message.content or ""

        def evaluate(resume: bool) -> Any:
            return agl.evaluate(
                agl.wrap(answer), TASKS[:2], samples=4, success=0.9, reward=judge(provider, votes=1), n_workers=1,
                directory=tmp_path / "eval", resume=resume, progress=False,
            )  # fmt: skip

        good, up = prefers(len), True

        def stops(body: dict[str, Any]) -> Reply:
            nonlocal up
            reply, up = good(body) if up else Reply(status=401), False
            return reply

        provider.script = stops
        with pytest.raises(JudgeError, match="did not answer: AuthenticationError"):
            evaluate(False)
        assert sorted(map(len, asyncio.run(rewards_of(tmp_path / "eval")))) == [0] * 4 + [1] * 4

        provider.script = good
        evaluation = evaluate(True)
        assert len(model.seen) == 8  # what had ended was not run again
        questions = [re.findall(r"question \d", seen.body["messages"][0]["content"])[0] for seen in provider.seen]
        assert questions.count("question 0") == 1  # nor what had been judged judged again
        [summary] = evaluation.policies.values()
        assert summary.success.value == pytest.approx(0.25)

    rewards = asyncio.run(rewards_of(tmp_path / "eval"))
    assert sorted(itertools.chain(*rewards)) == [0.0] * 4 + [0.5] * 2 + [1.0] * 2


async def rewards_of(directory: Path) -> list[list[float]]:
    """The rewards of each rollout, which made one call, its agent's own."""
    store = await open_store(f"sqlite:///{directory / 'run.db'}")
    try:
        rewards = []
        for rollout in await store.query_rollouts():
            spans = await store.query_spans(rollout.rollout_id)
            assert [s.agent for s in spans if s.operation == "chat"] == ["answer"]
            rewards.append([s.attributes["agl.reward.value"] for s in spans if s.operation == "reward"])
        return rewards
    finally:
        await store.close()


@pytest.mark.slow
def test_a_stopped_training_judges_what_was_not_judged(untrained_model: Path, tmp_path: Path) -> None:
    with serve() as provider:
        good = prefers(len)
        up = True

        def stops(body: dict[str, Any]) -> Reply:
            return good(body) if up else Reply(status=401)

        provider.script = stops
        algorithm = agl.GRPO(
            model=str(untrained_model), group_size=4, batch_size=3, steps=2, max_response_tokens=6, learning_rate=1e-3
        )

        class Down(agl.Callback):
            def on_step(self, run: Any, entry: Any) -> None:
                nonlocal up
                up = False

        options: Any = {"directory": tmp_path, "n_workers": 2, "progress": False, "group_reward": judge(provider)}
        with pytest.raises(JudgeError, match="Then resume"):
            agl.Trainer(algorithm, callbacks=Down(), **options).fit(routed, TASKS)
        up = True
        result = agl.Trainer(algorithm, **options).fit(routed, TASKS, resume=True)
        assert [entry["step"] for entry in result.history] == [1, 2]
        assert all(0 < entry["train/reward/rank"] < 1 for entry in result.history)
        assert all(entry["train/failed_rollouts"] == 0 for entry in result.history)


@pytest.mark.night
@pytest.mark.slow
def test_training_follows_what_the_judge_prefers(tiny_policy: Path, tmp_path: Path) -> None:
    """Exact answers come to be preferred by one who compares rollouts and is shown no answer of the task."""

    def script(body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        a, op, b = re.findall(r"task\nWhat is (\d+) (\S) (\d+)\?", text)[0]
        truth = calculate(f"{a} {op} {b}")
        right = [run.rpartition("assistant: ")[2].strip() == truth for run in RUN.findall(text)]
        return Reply(json.dumps({"reason": "so", "scores": {i: 9 if x else 1 for i, x in enumerate(right, 1)}}))

    with serve(script) as provider:
        result = train(tiny_policy, tmp_path, group_reward=judge(provider, votes=1, task="question"))
    assert gain(result) >= 0.8 * GAIN  # scores are 0.1 and 0.9
    assert all("train/reward/rank" in entry for entry in result.history if entry["step"])
