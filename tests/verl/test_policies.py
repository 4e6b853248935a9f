"""Two policies in one run: a trainer of verl's each, rollouts that run once for both, and rows of its own for each."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from jobs import algorithm
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from recomputed import ids_of, local_rows, whole

import agl
from agl.adapters.langchain import LangChainTracer
from agl.errors import TrainingError
from agl.trainer.run.trainer import Result
from agl.trainer.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
AGENTS = {"writer": "w", "checker": "c"}
GROUP, BATCH, STEPS, VAL = 4, 2, 2, 2
CAPTURED = {"trainer.checkpoint_callback_class": "captured.CapturedOwn"}


def program() -> Any:
    model = ChatOpenAI(model="any", api_key="unused")  # type: ignore[arg-type]
    writer, checker = create_agent(model, [], name="writer"), create_agent(model, [], name="checker")

    @agl.rollout
    async def draft_and_check(task: str) -> float:
        draft = (await writer.ainvoke({"messages": [{"role": "user", "content": task}]}))["messages"][-1].content
        verdict = await checker.ainvoke({"messages": [{"role": "user", "content": f"is {len(draft)} too long"}]})
        return (len(draft) + len(verdict["messages"][-1].content)) % 5 / 4

    return draft_and_check


def train(
    model: Path, other: Path, directory: Path, *, resume: bool = False, steps: int = STEPS, **options: Any
) -> Result:
    # With larger steps, ids that the tokenizer lacks, which vLLM never samples, can get enough mass in the text of the
    # weight check for vLLM's log-probs to differ from the actor's by 0.001 nats, its tolerance.
    verl = algorithm(
        model, CAPTURED, steps=steps, group_size=GROUP, batch_size=BATCH, checkpoint_every=1,
        val_before_train=False, val_every=STEPS, max_response_tokens=12, learning_rate=1e-4,
    )  # fmt: skip
    trainer = agl.Trainer(
        verl, agents=AGENTS, policies={"c": agl.Policy(model=str(other), lr=1.2e-4)}, tracer=LangChainTracer(),
        n_workers=8, seed=0, directory=directory, **options,
    )  # fmt: skip
    return trainer.fit(program(), [f"write {i}" for i in range(8)], ["hold", "out"][:VAL], resume=resume)


@pytest.fixture(scope="module")
def models(tiny_policy: Path, another_policy: Path) -> tuple[Path, Path]:
    return tiny_policy, another_policy


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two") / "run"


@pytest.fixture(scope="module")
def trained(cluster: None, models: tuple[Path, Path], directory: Path) -> Result:
    return train(*models, directory)


def test_both_policies_are_trained_served_and_saved(
    trained: Result, models: tuple[Path, Path], directory: Path, left_clean: None
) -> None:
    assert [h["step"] for h in trained.history] == [1, 2]
    for entry in trained.history:
        assert (entry["w/policy_version"], entry["c/policy_version"]) == (entry["step"], entry["step"])
        assert entry["train/rollouts"] == GROUP * BATCH
        for name in AGENTS.values():
            assert entry[f"{name}/verl/agl/probe/logprob_diff"] < 1e-3
            assert entry[f"{name}/verl/training/rollout_probs_diff_max"] < 1e-2
    assert "val/reward" in trained.history[-1]
    assert {name: path.relative_to(directory) for name, path in trained.policies.items()} == {
        name: Path("policies") / name for name in AGENTS.values()
    }
    for name, start in zip(AGENTS.values(), models, strict=True):
        assert trained.history[1][f"{name}/verl/agl/probe/moved"] > 1e-3
        assert _changed(start, trained.policies[name]) > 0.2
    assert _changed(trained.policies["w"], trained.policies["c"]) > 0.2
    assert trained.checkpoint == directory / "checkpoints" / "global_step_2"
    assert sorted(path.name for path in trained.checkpoint.iterdir()) == ["c", "w"]


@pytest.mark.parametrize(("agent", "policy"), AGENTS.items())
def test_each_trainer_has_the_rows_that_a_run_of_its_policy_alone_would_have(
    trained: Result, directory: Path, agent: str, policy: str
) -> None:
    """Exactly the ids, masks and log-probs of its own calls, and their advantages to 1e-6."""
    for step in range(1, STEPS + 1):
        rows = torch.load(directory / "checkpoints" / "policies" / policy / f"global_step_{step}" / "rows.pt")
        alone = asyncio.run(local_rows(trained.store, step, {agent: policy}))
        assert sum(map(len, alone.values())) == GROUP * BATCH
        assert sorted(map(ids_of, rows.values())) == sorted(ids for ids, of_ids in alone.items() for _ in of_ids)
        for row in rows.values():
            n = len(ids_of(row))
            logprobs, advantages = whole(row, "rollout_log_probs", n), whole(row, "advantages", n)
            assert any(
                np.array_equal(logprobs, theirs)
                and np.array_equal(whole(row, "response_mask", n).astype(bool), mask)
                and np.abs(advantages - of_row).max() <= 1e-6
                for mask, theirs, of_row in alone[ids_of(row)]
            )


def test_a_rollout_ran_once_for_both(trained: Result) -> None:
    async def look() -> tuple[int, set[tuple[str, ...]], set[int]]:
        store = await open_store(trained.store)
        try:
            rollouts = await store.query_rollouts(mode="train")
            calls = [await store.query_calls(r.rollout_id, r.attempts) for r in rollouts]
            trained_calls = [await store.query_trained_calls(r.rollout_id) for r in rollouts]
            of_steps = {t.step for of_rollout in trained_calls for t in of_rollout}
            assert all(t.tokens > 0 for of_rollout in trained_calls for t in of_rollout)
            assert {len(of_rollout) for of_rollout in trained_calls} == {2}
            return len(rollouts), {tuple(str(c.policy) for c in of_rollout) for of_rollout in calls}, of_steps
        finally:
            await store.close()

    assert asyncio.run(look()) == (GROUP * BATCH * STEPS, {("w", "c")}, {1, 2})


class KillTrainer(agl.Callback):
    """Kills one policy's trainer when a step is recorded."""

    def __init__(self, policy: str) -> None:
        self.policy, self.steps = policy, []

    def on_step(self, run: Any, entry: Any) -> None:
        self.steps.append(entry["step"])
        [trainer] = [child for child in _drivers() if child.cmdline()[-1] == self.policy]
        trainer.kill()


@pytest.mark.night
def test_a_trainer_that_dies_ends_the_run_which_resumes_where_both_are(
    trained: Result, models: tuple[Path, Path], directory: Path, left_clean: None
) -> None:
    """At first one trainer has saved the second step, the other has not."""
    checkpoints = directory / "checkpoints"
    latest = checkpoints / "latest_checkpointed_iteration.txt"
    latest.write_text("1")
    shutil.rmtree(checkpoints / "policies" / "c" / "global_step_2")
    kill = KillTrainer("c")
    with pytest.raises(TrainingError, match=r"verl's trainer of policy 'c' died \(exit code -9\)"):
        train(*models, directory, resume=True, steps=STEPS + 1, callbacks=kill)
    assert kill.steps == [2], "it went on after the step that both have"
    assert latest.read_text() == "2"
    for name in AGENTS.values():
        log = directory / f"verl-{name}.log"
        assert "setting global step to 1" in log.read_text()
        log.unlink()
    assert _drivers() == []

    result = train(*models, directory, resume=True, steps=STEPS + 1)
    assert [h["step"] for h in result.history] == [1, 2, 3]
    assert result.history[0] == trained.history[0]
    for name in AGENTS.values():
        assert "setting global step to 2" in (directory / f"verl-{name}.log").read_text()
    assert latest.read_text() == "3"


def _drivers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "agl_verl.driver" in child.cmdline()]


def _changed(a: Path, b: Path) -> float:
    """The share of weights that differ between two models' directories by more than bfloat16 rounds, in which verl
    saves them."""
    from transformers import AutoModelForCausalLM

    left, right = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict() for path in (a, b))
    return float(torch.cat([(left[name] != right[name]).float().flatten() for name in left]).mean())
