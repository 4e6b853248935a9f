"""`max_staleness`: calls of weights that are too old are refused, and so is the setting where it does not apply."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import agl
from agl.credit import Uniform
from agl.errors import AglError, ConfigError, StalePolicyError
from agl.mdp.types import Call, Reward, Trajectory, Transition
from agl.trainer.algorithms.worth import make_rows
from agl.trainer.objectives.advantages import StepAdvantages, compute_advantages


def called(version: int, i: int = 0, **request: Any) -> Call:
    return Call(
        id=f"c{i}", rollout_id=f"r{i}", attempt=1, index=0, agent="writer", policy="policy", policy_version=version,
        prompt_ids=np.int32([1, 2]), response_ids=np.int32([3, 4]), logprobs=np.float32([-1, -1]), request=request,
    )  # fmt: skip


def sampled_by(*versions: int) -> StepAdvantages:
    """A group of rollouts of one call each."""
    trajectories = []
    for i, version in enumerate(versions):
        transition = Transition(called(version, i))
        trajectories.append(Trajectory(f"r{i}", 1, "policy", "g", (transition,), (Reward("reward", float(i)),)))
    return compute_advantages(trajectories, Uniform(), estimator="grpo")


def training(version: int) -> Any:
    return SimpleNamespace(names=("policy",), versions={"policy": version})


@pytest.mark.parametrize(("version", "max_staleness"), [(3, 0), (4, 1), (7, 4)])
def test_calls_within_the_bound_are_trained(version, max_staleness):
    rows = make_rows(sampled_by(3, version), training(version), 7, max_staleness)
    assert sum(row.n_actions for row in rows["policy"]) == 4


@pytest.mark.parametrize(("version", "max_staleness"), [(4, 0), (5, 1), (2, 1), (8, 4)])
def test_calls_beyond_the_bound_are_refused(version, max_staleness):
    with pytest.raises(StalePolicyError, match=f"version 3 .* version {version} .* max_staleness is {max_staleness}"):
        make_rows(sampled_by(3, 3), training(version), 7, max_staleness)


def test_the_bound_is_checked():
    assert agl.GRPO(model="m", steps=1).max_staleness == 0
    with pytest.raises(ConfigError, match="max_staleness=-1 is below 0"):
        agl.GRPO(model="m", steps=1, max_staleness=-1)
    with pytest.raises(ConfigError, match="max_staleness=2 is not 0 or 1"):
        agl.Distill(model="m", teacher="t", steps=1, max_staleness=2)


def test_an_agent_with_a_memory_cannot_run_far_ahead(tmp_path):
    agent = agl.wrap(lambda task: None, reward=lambda task, answer: 0.0, memory=agl.Memory().per("agent"))
    trainer = agl.Trainer(agl.GRPO(model="m", steps=1, max_staleness=2), directory=tmp_path, progress=False)
    with pytest.raises(ConfigError, match="max_staleness=2 with an agent that has a memory"):
        trainer.fit(agent, [{"x": 1}])


def test_one_rollout_of_a_task_has_no_spread():
    with pytest.raises(ConfigError, match="task_sampling='learnability' with group_size=1"):
        agl.REINFORCE(model="m", steps=1, task_sampling="learnability")
    with pytest.raises(ConfigError, match="task_sampling='hard' is not known"):
        agl.GRPO(model="m", steps=1, task_sampling="hard")


def test_a_call_knows_the_versions_of_its_tokens():
    call = called(3, used={"versions": [[0, 3], [1, 5]]})
    assert (call.versions, call.newest_version) == (((0, 3), (1, 5)), 5)
    assert (called(3).versions, called(3).newest_version) == (((0, 3),), 3)


@pytest.mark.parametrize("algorithm", [agl.Baseline, agl.VERL])
def test_other_algorithms_refuse_it(algorithm: Any):
    with pytest.raises(AglError, match="max_staleness"):
        algorithm(model="m", max_staleness=1)
