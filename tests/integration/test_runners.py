"""What is the same wherever rollouts run: in this process, in worker processes, on Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from running import attempts, fit, say

import agl
from agl import semconv
from agl.errors import RolloutError
from agl.testing.provider import says, serve
from agl.trainer.quickstart.tasks import arithmetic_tasks
from agl.trainer.store import open_store

RUNNERS = ["local", "process", "ray"]


@pytest.fixture(scope="module")
def a_ray(one_ray: None) -> Iterator[None]:
    """A small Ray of the user's, which runs join and leave as it is."""
    import ray

    ray.init(
        "local", num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=80 * 2**20, logging_level="ERROR"
    )
    yield
    assert ray.is_initialized(), "what was there before stays"
    ray.shutdown()
    # Ray keeps a handler of its own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(params=RUNNERS)
def runners(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        pytest.importorskip("ray")
        request.getfixturevalue("a_ray")
    return request.param


@agl.rollout
async def asks(task: Any, llm: agl.LLM, resources: Any) -> None:
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task["q"]}])
    right = answer.choices[0].message.content == resources["right"]
    agl.emit_reward({"right": float(right), "pid": float(os.getpid())}, primary="right")


def only_asks(name: str) -> bool:
    return name == "asks"


def test_rollouts_come_back_whole(runners: Any, tmp_path: Path, no_process_left: None) -> None:
    """Calls, spans and rewards; with a function in agents= and a resource, which no lease in JSON could carry."""
    done = fit(
        asks, [{"q": str(i)} for i in range(6)], tmp_path, runners=runners, agents=only_asks,
        initial_resources={"right": "four"},
    )  # fmt: skip
    assert done.rewards == [1.0] * 6
    assert all(len(calls) == 1 and calls[0].agent == "asks" for calls in done.calls)
    assert all({s.operation for s in spans} >= {"invoke_agent", "chat", "reward"} for spans in done.spans)
    rewards = [span.attributes for spans in done.spans for span in spans if span.operation == "reward"]
    pids = {r[semconv.REWARD_VALUE] for r in rewards if r[semconv.REWARD_NAME] == "pid"}
    assert pids
    assert (float(os.getpid()) in pids) == (runners == "local")


class Unusual(ValueError):
    """Of this file's."""


def test_what_an_agent_raises_is_told_with_its_traceback(runners: Any, tmp_path: Path) -> None:
    @agl.rollout
    def raises(task: Any, llm: agl.LLM) -> float:
        raise Unusual("the tool is broken")

    with pytest.raises(RolloutError, match=r"agent 'raises' raised Unusual: the tool is broken"):
        fit(raises, [{}], tmp_path, runners=runners, max_attempts=1)
    [[attempt]] = attempts(tmp_path)
    assert attempt.status == "failed"
    assert 'raise Unusual("the tool is broken")' in (attempt.error or "")


def test_errors_of_ours_stay_what_they_are(runners: Any, tmp_path: Path) -> None:
    @agl.rollout
    def emits(task: Any, llm: agl.LLM) -> None:
        say(llm, "hello")
        agl.emit_reward(float("nan"))

    with pytest.raises(agl.errors.RewardError, match="finite"):
        fit(emits, [{}], tmp_path, runners=runners, max_attempts=1)


class Notes(agl.Hook):
    """Writes what it sees into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{agent.name} {len(spans) > 0}\n")


def test_hooks_are_called_where_the_rollout_runs(runners: Any, tmp_path: Path) -> None:
    fit(asks, [{"q": "2+2"}] * 2, tmp_path, runners=runners, hooks=Notes(tmp_path / "notes"),
        initial_resources={"right": "four"})  # fmt: skip
    assert (tmp_path / "notes").read_text() == "asks True\n" * 2


def test_an_agent_may_be_named(runners: Any, tmp_path: Path) -> None:
    """A LangChain agent holds clients, which cannot be pickled; named, it is built where it runs."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import agl
        from agl.trainer.quickstart.agent import build_agent

        solver = agl.wrap(build_agent(), reward=lambda task, output: float(output == "four"))
        """)
    )
    done = fit(f"{tmp_path / 'mine.py'}:solver", [{"question": "2+2"}] * 2, tmp_path / "run", runners=runners)
    assert done.rewards == [1.0, 1.0]
    assert {call.agent for calls in done.calls for call in calls} == {"solver"}


@pytest.mark.slow
def test_training_is_the_same_in_processes(tiny_policy: Path, tmp_path: Path, no_process_left: None) -> None:
    """Rewards, and the tokens that each seed sampled, in two real steps."""
    (tmp_path / "solver.py").write_text(
        textwrap.dedent("""
        import agl
        from agl.trainer.quickstart.agent import build_agent
        from agl.trainer.quickstart.tasks import exact_answer

        solver = agl.wrap(build_agent(), reward=exact_answer)
        """)
    )
    seen = []
    for runners in ("local", "process"):
        trainer = agl.Trainer(
            agl.GRPO(
                model=str(tiny_policy), group_size=4, batch_size=2, steps=2, learning_rate=5e-4,
                max_response_tokens=48, max_context=256,
            ),
            runners=runners, n_workers=1, directory=tmp_path / runners, seed=3, progress=False,
        )  # fmt: skip
        result = trainer.fit(f"{tmp_path / 'solver.py'}:solver", arithmetic_tasks(16, seed=0, split="train"))
        rewards = [h["train/reward"] for h in result.history if "train/reward" in h]
        assert len(rewards) == 2
        seen.append((rewards, asyncio.run(_sampled(tmp_path / runners))))
    assert seen[0] == seen[1]
    assert len(seen[0][1]) == 16


async def _sampled(directory: Path) -> dict[int, list[list[int]]]:
    """Seed of each rollout -> the tokens of its calls."""
    store = await open_store(f"sqlite:///{directory / 'run.db'}")
    sampled = {}
    for rollout in await store.query_rollouts():
        calls = sorted(await store.query_calls(rollout.rollout_id), key=lambda call: call.index)
        sampled[rollout.seed] = [call.response_ids.tolist() for call in calls]
    await store.close()
    return sampled


def test_a_client_of_the_module_serves_one_run_after_another(tmp_path: Path) -> None:
    """An async client belongs to the loop of its first request, and a program has one for `dev` and then `fit`."""

    async def judged(task: Any) -> float:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return float(len(answer.choices[0].message.content or ""))

    with serve(says("hello")) as provider:
        client = AsyncOpenAI(base_url=provider.url, api_key="k", max_retries=0)
        for i in range(3):
            report = agl.evaluate(
                agl.rollout(judged), [{}, {}, {}], directory=tmp_path / str(i), max_attempts=1, progress=False
            )
            [policy] = report.policies.values()
            assert (policy.failed, policy.reward.value) == (0, 5.0)
