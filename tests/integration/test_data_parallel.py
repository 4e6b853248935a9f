"""Several processes that hold one policy: what they compute together is what one computes, and they stay equal."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_rows import sampled_rows
from tiny_engine import tiny_model, tiny_tokenizer
from tiny_run import TRAIN, agent

import agl
from agl.errors import ConfigError, EngineError, TrainingError
from agl.mdp.sequence import TrainingRow
from agl.trainer.engines.base import Completion, Request, Sampling
from agl.trainer.local import policy
from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.learner.ranks import EVEN, Ranks
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.processes.child import Child

PROMPTS = [np.arange(40, 60 + k, dtype=np.int32) for k in range(6)]
ADVANTAGES = [1.0, -1.0, 0.5]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many passes": {"max_tokens_per_microbatch": 40, "minibatches": 2, "share_prefixes": False},
    "reference and importance": {"kl_coef": 0.1, "rollout_is": "token", "entropy_coef": 0.01},
    "a step that goes too far": {"learning_rate": 0.02, "max_kl": 0.005},
    "beginnings computed once": {"max_tokens_per_microbatch": 40, "kl_coef": 0.1},
    "critic": {"critic": True, "update_epochs": 2},
    "preferences": {"policy_loss": "dpo"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def spec_for(directory: Path, n: int, learner: LearnerConfig, **changes: Any) -> PolicySpec:
    return PolicySpec(str(directory), device="cpu", threads=1, learner=learner, data_parallel=n, **changes)


async def rows_of(policy: LocalPolicy) -> list[TrainingRow]:
    """Groups of three answers to prompts of different lengths."""
    made = [await sampled_rows(policy, prompt, ADVANTAGES, 3 * k) for k, prompt in enumerate(PROMPTS)]
    return [row for rows in made for row in rows]


async def states(policy: LocalPolicy, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The trained weights of each process."""
    folder.mkdir()
    found = []
    for rank, peer in enumerate(policy.process._peers):
        await peer.call("save_state", policy.spec.name, str(folder / str(rank)))
        found.append(torch.load(folder / str(rank), weights_only=True)["learner"]["weights"])
    return found


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["whole", "lora"])
def test_updates_are_those_of_one_process(directory: Path, tmp_path: Path, way: str, lora: LoraSpec | None) -> None:
    if lora is not None and way not in ("plain", "reference and importance", "beginnings computed once"):
        pytest.skip("what LoRA has of its own is in these")
    learner = LearnerConfig(**{"learning_rate": 1e-3, **WAYS[way]})

    async def compare() -> None:
        alone, both = await asyncio.gather(
            *(LocalPolicy.start(spec_for(directory, n, learner, lora=lora)) for n in (1, 2))
        )
        try:
            (start,) = await states(alone, tmp_path / "start")
            rows = await rows_of(alone)
            pairs = [(f"r{k}", f"r{k + 1}") for k in range(0, 18, 3)] if way == "preferences" else []
            for update in range(2):
                expected = await alone.train(rows, pairs=pairs)
                metrics = await both.train(rows, pairs=pairs)
                assert both.version == alone.version
                assert metrics.keys() == expected.keys()
                # Before the first update the policy is its reference: which of two equal rewards is higher is rounding.
                rounding = {"reward_accuracy"} if update == 0 else set()
                if way == "preferences":
                    assert (abs(metrics["reward_margin"]) < 1e-5) is (update == 0)
                for name in metrics.keys() - {"forwarded_tokens"} - rounding:
                    assert metrics[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-5), name
                assert expected["forwarded_tokens"] <= metrics["forwarded_tokens"]
            (one,), (first, second) = await states(alone, tmp_path / "one"), await states(both, tmp_path / "two")
            assert difference(first, second) == 0
            assert difference(one, first) < 0.01 * difference(one, start)
            if way == "beginnings computed once":
                assert metrics["forwarded_tokens"] < 1.3 * metrics["unique_tokens"]
            if way == "plain":
                assert difference(one, first) < 1e-6
                expected_rows = await alone.sequence_logprobs(rows)
                for ours, theirs in zip(await both.sequence_logprobs(rows), expected_rows, strict=True):
                    np.testing.assert_allclose(ours, theirs, atol=1e-5)
            if way == "a step that goes too far":
                assert 0 < metrics["step_taken"] < 1
        finally:
            await asyncio.gather(alone.close(), both.close())

    asyncio.run(compare())


def test_a_gradient_that_is_not_finite_is_an_error_in_all_and_changes_none(directory: Path, tmp_path: Path) -> None:
    async def break_one() -> None:
        policy = await LocalPolicy.start(spec_for(directory, 2, LearnerConfig(learning_rate=1e-3)))
        try:
            rows = await rows_of(policy)
            before = await states(policy, tmp_path / "before")
            rows[4].advantages[rows[4].action_mask] = 3e38
            rows[4].advantages[-1] = -3e38
            with pytest.raises(TrainingError, match="not finite"):
                await policy.train(rows)
            assert [difference(*pair) for pair in zip(before, await states(policy, tmp_path / "x"), strict=True)] == [
                0,
                0,
            ]
            await policy.train(await rows_of(policy))
            assert difference(*await states(policy, tmp_path / "after")) == 0
        finally:
            await policy.close()

    asyncio.run(break_one())


def test_each_samples_for_some_and_one_seed_has_one_answer(directory: Path) -> None:
    async def sample() -> None:
        alone, both = await asyncio.gather(
            *(LocalPolicy.start(spec_for(directory, n, LearnerConfig())) for n in (1, 2))
        )
        try:
            requests = [
                Request(PROMPTS[k % 6], Sampling(max_tokens=8, seed=k), owner=f"attempt-{k // 2}") for k in range(12)
            ]

            async def answers(policy: LocalPolicy) -> list[Completion]:
                return await asyncio.gather(*(policy.generate(request) for request in requests))

            expected, found = await answers(alone), await answers(both)
            assert [list(c.token_ids) for c in found] == [list(c.token_ids) for c in expected]
            homes = [both.process._home(f"attempt-{k}") for k in range(6)]
            assert sorted(homes) == [0, 0, 0, 1, 1, 1]
        finally:
            await asyncio.gather(alone.close(), both.close())

    asyncio.run(sample())


@pytest.mark.usefixtures("executed_policies")
def test_when_one_dies_the_error_names_it_and_none_is_left(directory: Path) -> None:
    async def kill() -> None:
        policy = await LocalPolicy.start(spec_for(directory, 2, LearnerConfig()))
        deaths: list[Exception] = []
        policy.process.on_death(deaths.append)
        rows = await rows_of(policy)
        pids = [child.process.pid for child in policy.process._children]
        os.kill(pids[1], signal.SIGSTOP)
        update = asyncio.ensure_future(policy.train(rows))
        await asyncio.sleep(0.3)
        assert not update.done(), "the first waits for the second"
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineError, match=r"died \(exit code -9, number 2 of 2\)"):
            await update
        assert len(deaths) == 1
        await policy.close()
        assert all(child.process.returncode is not None for child in policy.process._children)

    asyncio.run(kill())


def test_a_run_that_lost_a_process_goes_on_with_another_number_of_them(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Child] = []

    # Nothing that a run shows has its processes.
    def start(*arguments: Any, **options: Any) -> Child:
        started.append(kind(*arguments, **options))
        return started[-1]

    kind = policy.Child
    monkeypatch.setattr(policy, "Child", start)

    class Killer(agl.Callback):
        def on_step(self, run: Any, entry: Any) -> None:
            if entry["step"] == 2:
                os.kill(started[-1].process.pid, signal.SIGKILL)

    def train(name: str, n: int, callbacks: Any = (), *, resume: bool = False) -> agl.Result:
        algorithm = agl.GRPO(
            model=str(untrained_model), steps=3, group_size=4, batch_size=2, learning_rate=1e-3, max_context=128,
            max_response_tokens=6, checkpoint_every=1, device="cpu", threads=1, data_parallel=n,
        )  # fmt: skip
        trainer = agl.Trainer(algorithm, directory=tmp_path / name, progress=False, callbacks=callbacks, n_workers=1)
        return trainer.fit(agent, TRAIN, resume=resume)

    whole = train("whole", 1)
    with pytest.raises(EngineError, match="number 2 of 2"):
        train("lost", 2, Killer())
    result = train("lost", 1, resume=True)
    assert [step["step"] for step in result.history] == [1, 2, 3]
    for name in ("train/reward", "learner/loss", "learner/grad_norm"):
        expected = [step[name] for step in whole.history]
        assert [step[name] for step in result.history] == pytest.approx(expected, abs=1e-5), name


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=8, max_size=80), st.integers(1, 4))
def test_the_work_is_spread_evenly_and_all_of_it_is_done(lengths: list[int], size: int) -> None:
    def divide(most: int) -> list[list[int]]:
        batches: list[list[int]] = []
        for i, length in enumerate(lengths):
            if batches and sum(lengths[k] for k in batches[-1]) + length <= most:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def cost(batch: list[int]) -> int:
        return sum(lengths[i] for i in batch)

    parts = [Ranks(rank, size).share(divide, cost, 4096) for rank in range(size)]
    assert sorted(i for part in parts for batch in part for i in batch) == list(range(len(lengths)))
    loads = [sum(map(cost, part)) for part in parts]
    assert max(loads) <= max(EVEN * sum(loads) / size, sum(loads) / size + max(lengths))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_parallel": 0}, "1 or more"),
        ({"data_parallel": 2, "device": "cuda:1"}, "the first GPUs"),
        ({"data_parallel": 2, "device": "mps"}, "the first GPUs"),
        ({"data_parallel": "two"}, "data_parallel"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        agl.GRPO(model="m", steps=1, **changes)
