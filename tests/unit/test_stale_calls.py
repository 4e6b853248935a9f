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


def sampled_by(*versions: int) -> StepAdvantages:
    """A group of rollouts of one call each."""
    trajectories = []
    for i, version in enumerate(versions):
        call = Call(
            id=f"c{i}", rollout_id=f"r{i}", attempt=1, index=0, agent="writer", policy="policy", policy_version=version,
            prompt_ids=np.int32([1, 2]), response_ids=np.int32([3, 4]), logprobs=np.float32([-1, -1]),
        )  # fmt: skip
        trajectories.append(Trajectory(f"r{i}", 1, "policy", "g", (Transition(call),), (Reward("reward", float(i)),)))
    return compute_advantages(trajectories, Uniform(), estimator="grpo")


def training(version: int) -> Any:
    return SimpleNamespace(names=("policy",), versions={"policy": version})


@pytest.mark.parametrize(("version", "max_staleness"), [(3, 0), (4, 1)])
def test_calls_within_the_bound_are_trained(version, max_staleness):
    rows = make_rows(sampled_by(3, version), training(version), 7, max_staleness)
    assert sum(row.n_actions for row in rows["policy"]) == 4


@pytest.mark.parametrize(("version", "max_staleness"), [(4, 0), (5, 1), (2, 1)])
def test_calls_beyond_the_bound_are_refused(version, max_staleness):
    with pytest.raises(StalePolicyError, match=f"version 3 .* version {version} .* max_staleness is {max_staleness}"):
        make_rows(sampled_by(3, 3), training(version), 7, max_staleness)


def test_the_bound_is_0_or_1():
    assert agl.GRPO(model="m", steps=1).max_staleness == 0
    with pytest.raises(ConfigError, match="max_staleness=2 is not 0 or 1"):
        agl.GRPO(model="m", steps=1, max_staleness=2)


@pytest.mark.parametrize("algorithm", [agl.Baseline, agl.VERL])
def test_other_algorithms_refuse_it(algorithm: Any):
    with pytest.raises(AglError, match="max_staleness"):
        algorithm(model="m", max_staleness=1)
