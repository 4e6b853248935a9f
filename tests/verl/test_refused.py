"""What cannot be trained on the cluster ends with an error that says why, and leaves nothing there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import algorithm, quickstart, train

import agl
from agl.errors import ConfigError, RolloutError

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("options", [{"mode": "colocate_async"}, {"mode": "separate_async", "rollout_gpus": 1}])
def test_two_policies_that_are_not_synchronous(tiny_policy: Path, tmp_path: Path, options: Any) -> None:
    with pytest.raises(ConfigError, match=r"several policies.*trainer_mode='.*_async' does not allow"):
        train(
            quickstart(), algorithm(tiny_policy, steps=1, **options), tmp_path / "run", agents={"a": "one", "b": "two"}
        )


def test_the_gpus_of_all_policies_count(cluster: None, left_clean: None, tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 4 GPU\(s\).*for each of 2 policies.*Ray has 2"):
        train(quickstart(), algorithm(tiny_policy, steps=1, gpus=2), tmp_path / "run", agents={"a": "one", "b": "two"})


def test_more_gpus_than_there_are(cluster: None, left_clean: None, tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 4 GPU\(s\).*Ray has 2"):
        train(quickstart(), algorithm(tiny_policy, steps=1, gpus=4), tmp_path / "run")


def test_another_verl_run_on_the_cluster(cluster: None, tiny_policy: Path, tmp_path: Path) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Other:
        pass

    other = Other.options(name="TransferQueueController", namespace="transfer_queue").remote()
    try:
        with pytest.raises(ConfigError, match="another verl run is on this Ray cluster"):
            train(quickstart(), algorithm(tiny_policy, steps=1), tmp_path / "run")
    finally:
        ray.kill(other)


@agl.rollout
async def broken(task: Any, llm: agl.LLM) -> float:
    raise KeyError("operands")


@pytest.mark.night
@pytest.mark.slow
def test_a_batch_that_comes_to_nothing(cluster: None, left_clean: None, tiny_policy: Path, tmp_path: Path) -> None:
    """verl would fill the step up with rows that train nothing."""
    with pytest.raises((RolloutError, KeyError), match="operands"):
        train(
            broken, algorithm(tiny_policy, steps=1, batch_size=4, val_before_train=False), tmp_path / "run",
            max_attempts=1, heldout=4,
        )  # fmt: skip
