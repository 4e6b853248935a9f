"""Several policies in one verl run: their trainers' requests are brought together, and each has its plan and record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from call_trees import random_calls, trajectory
from verl_config import CONFIG, plan
from verl_rows import result

import agl
from agl.credit import Uniform
from agl.errors import ConfigError, TrainingError
from agl.mdp.types import Reward
from agl_verl import checkpoints
from agl_verl.barrier import Barrier
from agl_verl.config.plan import ACTOR, MODEL
from agl_verl.config.policies import plans
from agl_verl.events import Checkpoint, RolloutRequest, StepResult, TrainingEnd, TrainingStart
from agl_verl.metrics import TrainedPolicy, facts
from agl_verl.overrides import bridge_overrides
from agl_verl.rows import ADVANTAGES, Prompt, train_rows


def request(uid: str, *indices: int, step: int = 1, validate: bool = False) -> RolloutRequest:
    return RolloutRequest(tuple(Prompt(f"{uid}-{i}", i, 4, step, validate) for i in indices))


def test_a_request_counts_once_all_policies_have_made_it() -> None:
    barrier = Barrier(["a", "b"])
    first, second = request("a", 3, 1), request("a", 5, step=2)
    assert barrier.arrive("a", first) is None
    assert barrier.arrive("a", second) is None, "a trainer that is ahead waits"
    same = request("b", 3, 1)
    assert barrier.arrive("b", same) == {"a": first, "b": same}
    assert barrier.arrive("b", later := request("b", 5, step=2)) == {"a": second, "b": later}


def test_events_of_different_kinds_do_not_meet() -> None:
    barrier = Barrier(["a", "b"])
    assert barrier.arrive("a", Checkpoint(1, "/a")) is None
    assert barrier.arrive("b", StepResult(1, (), {})) is None
    assert barrier.arrive("b", Checkpoint(1, "/b")) is not None
    assert Barrier(["only"]).arrive("only", TrainingEnd()) is not None


@pytest.mark.parametrize(
    ("of_a", "of_b", "message"),
    [
        (request("a", 3, 1), request("b", 3, 2), "'a' requests 4 rollouts each of tasks 3, 1 for step 1, policy 'b'"),
        (request("a", 3), request("b", 3, 1), "tasks 3 for step 1, policy 'b' requests 4 rollouts each of tasks 3, 1"),
        (request("a", 3), request("b", 3, validate=True), "tasks 3 for the validation after step 1"),
        (request("a", 3), RolloutRequest(()), "policy 'b' requests no rollouts"),
        (TrainingStart(1, 4), TrainingStart(2, 4), "'a' begins step 1 of 4, policy 'b' begins step 2 of 4"),
        (Checkpoint(1, "x"), Checkpoint(2, "x"), "'a' has saved step 1, policy 'b' has saved step 2"),
        (StepResult(3, (), {}), StepResult(2, (), {}), "'a' has trained step 3, policy 'b' has trained step 2"),
    ],
)  # fmt: skip
def test_trainers_at_different_places_are_an_error(of_a: Any, of_b: Any, message: str) -> None:
    barrier = Barrier(["a", "b"])
    barrier.arrive("a", of_a)
    with pytest.raises(TrainingError, match="not at the same place") as error:
        barrier.arrive("b", of_b)
    assert message in str(error.value)
    assert "resume=True" in str(error.value)


def test_each_policy_has_its_own_model_rate_and_adapter() -> None:
    lora = agl.LoraSpec(rank=8, alpha=4.0, target_modules=("q_proj",))
    own = plans(plan(CONFIG), ["a", "b"], {"b": agl.Policy(model="other/model", lr=0.5, lora=lora)})
    assert [*own] == ["a", "b"]
    assert own["a"] == plan(CONFIG)
    b = own["b"]
    assert (b.model, b.learning_rate, b.lora_rank, b.lora_alpha, b.lora_targets) == (
        "other/model", 0.5, 8, 4, ("q_proj",),
    )  # fmt: skip
    assert type(b.settings[f"{MODEL}.lora_alpha"]) is int, "verl takes no float"
    changed = {
        f"{MODEL}.path",
        f"{ACTOR}.optim.lr",
        *(f"{MODEL}.{x}" for x in ("lora_rank", "lora_alpha", "target_modules")),
    }
    assert {k for k, v in b.settings.items() if own["a"].settings.get(k) != v} == changed


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("trainer.v1.trainer_mode", "colocate_async", "mode='sync'"),
        ("trainer.v1.trainer_mode", "separate_async", "mode='sync'"),
        ("algorithm.filter_groups.enable", True, "leave it out"),
        ("trainer.v1.sampler.sync_refill_failed_groups", True, "leave it out"),
        ("trainer.v1.sampler.custom_sampler.path", "mine.py", "leave it out"),
        ("trainer.max_actor_ckpt_to_keep", 1, "keep at least 2"),
    ],
)
def test_what_several_policies_cannot_have_is_refused(key: str, value: Any, hint: str) -> None:
    common = plan({**CONFIG, key: value})
    with pytest.raises(ConfigError, match=f"several policies.*{key}") as error:
        plans(common, ["a", "b"], {})
    assert hint in str(error.value)
    assert plans(common, ["a"], {}) == {"a": common}


@pytest.mark.parametrize(("option", "value"), [("dropout", 0.1), ("alpha", 2.5)])
def test_adapters_that_verl_does_not_have_are_refused(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"policy 'b' has lora.{option}={value}"):
        plans(plan(CONFIG), ["a", "b"], {"b": agl.Policy(lora=agl.LoraSpec(**{option: value}))})


def test_a_policys_rows_are_those_that_it_would_have_alone() -> None:
    """The rollouts are the same for all; a policy's calls, and what they are worth, are its own."""
    rng = np.random.default_rng(0)
    mixed, of_policy = [], {"a": [], "b": []}
    for k in range(4):
        calls = [
            replace(c, policy=policy, agent=policy)
            for i, c in enumerate(random_calls(rng, 6, rollout=f"r{k}"))
            for policy in ("ab"[i % 2],)
        ]
        rewards = (Reward("reward", float(k % 3)),)
        mixed.append(result(replace(trajectory(calls, f"r{k}"), policy=None, rewards=rewards), k))
        for policy, found in of_policy.items():
            own = trajectory([c for c in calls if c.policy == policy], f"r{k}")
            found.append(result(replace(own, policy=None, rewards=rewards), k))
    options: Any = {"estimator": "grpo", "normalize_std": True, "own": True}
    prompt = Prompt("u", 0, 4, 1, False)
    for policy, alone in of_policy.items():
        rows = train_rows(prompt, mixed, Uniform(), policy=policy, **options).rows
        expected = train_rows(prompt, alone, Uniform(), policy=policy, **options).rows
        assert {c for row in rows for c in row.chain.calls} == {
            t.call.id for r in alone for t in r.attempt_trajectory.trajectory.transitions if t.trainable
        }
        assert [row.key for row in rows] == [row.key for row in expected]
        for row, same in zip(rows, expected, strict=True):
            for name in ("input_ids", "response_mask", "rollout_log_probs", ADVANTAGES):
                np.testing.assert_array_equal(row.fields[name], same.fields[name])
        assert any(row.fields[ADVANTAGES].any() for row in rows)


def test_metrics_of_several_policies_begin_with_their_names() -> None:
    results = {"a": StepResult(3, (), {"timing_s/step": 2.0, "x": 1.0}), "b": StepResult(3, (), {"timing_s/step": 4.0})}
    entry = facts(3, {name: TrainedPolicy(result, [], []) for name, result in results.items()})
    assert (entry["a/policy_version"], entry["b/policy_version"], entry["seconds"]) == (3, 3, 4.0)
    assert (entry["a/verl/x"], "b/verl/x" in entry, "verl/x" in entry) == (1.0, False, False)
    alone = facts(3, {"a": TrainedPolicy(results["a"], [], [])})
    assert (alone["policy_version"], alone["verl/x"]) == (3, 1.0)


def run_in(directory: Path, *, resume: bool = False) -> Any:
    async def record_checkpoint(path: Path, step: int) -> None:
        run.checkpoint = path

    run = SimpleNamespace(
        directory=directory, run_id="r", seed=0, train=[1], val=[], history=[{"step": 1}], resume=resume,
        checkpoint=None, record_checkpoint=record_checkpoint,
    )  # fmt: skip
    return run


def test_a_checkpoint_is_one_folder_with_a_link_per_policy(tmp_path: Path) -> None:
    of_policies = dict.fromkeys(["a", "b"], plan(CONFIG))
    run, paths = run_in(tmp_path), {}
    for name in of_policies:
        path = checkpoints.folder(run, name) / "global_step_1"
        (path / "actor" / "huggingface").mkdir(parents=True)
        (path / "actor" / "huggingface" / "model.safetensors").write_text(name)
        paths[name] = str(path)
    asyncio.run(checkpoints.record_checkpoint(run, of_policies, 1, paths))
    assert run.checkpoint == tmp_path / "checkpoints" / "global_step_1"
    links = checkpoints.publish(run, [*of_policies])
    assert links == {name: tmp_path / "policies" / name for name in of_policies}
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    for name in of_policies:
        assert (moved / "policies" / name / "model.safetensors").read_text() == name
        assert (moved / "checkpoints" / "global_step_1" / name / "actor").is_dir()

    # One trainer has saved the next step, the other has not: both resume after the first.
    checkpoints.folder(run_in(moved), "a").joinpath("global_step_2").mkdir()
    again = run_in(moved, resume=True)
    resumed = checkpoints.restore(again, of_policies)
    assert resumed is not None
    assert (resumed.step, again.checkpoint) == (1, moved / "checkpoints" / "global_step_1")
    for name in of_policies:
        keys = bridge_overrides(again, of_policies[name], first_step=1, policy=name)
        assert keys["trainer.resume_mode"] == "resume_path"
        assert Path(keys["trainer.resume_from_path"]) == checkpoints.folder(again, name) / "global_step_1"
        assert Path(keys["trainer.default_local_dir"]) == checkpoints.folder(again, name)
