"""The cluster's tests: real verl, Ray and vLLM on the CPU, where `deploy/verl-cpu.sh` has built them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from verl_cpu.settings import environment  # noqa: E402

if any(find_spec(name) is None for name in ("verl", "vllm", "ray", "transfer_queue")):
    collect_ignore_glob = ["test_*.py"]
else:
    # verl looks for platforms as it is first imported, whichever test does that.
    os.environ.update(environment())


@pytest.fixture(scope="session", autouse=True)
def forked_policies() -> None:
    """Nothing is forked here: these processes meet vLLM and Ray as users' do."""


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's policy from random weights: with induction heads, vLLM's float32 is 0.002 nats off."""
    from agl.trainer.quickstart.policy import Recipe, make_policy

    recipe = Recipe(capability_steps=300, mixed_steps=100, warmup_steps=30)
    folder = tmp_path_factory.mktemp("tiny-policy")
    return make_policy(folder, seed=0, threads=1, recipe=recipe, induction=False).directory


@pytest.fixture(scope="session")
def another_policy(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, a little moved: from random weights alone, verl's log-probs differ from vLLM's, which samples no id
    that the tokenizer lacks."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("another-policy") / "policy"
    shutil.copytree(tiny_policy, folder)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    moved = {k: w + 1e-3 * torch.randn(w.shape, generator=noise, dtype=w.dtype) for k, w in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray that is not the run's own, so that it must be left as it was found."""
    import ray

    ray.init(
        address="local", num_gpus=2, num_cpus=16, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR, runtime_env={"env_vars": environment()},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
def left_clean(cluster: None) -> Iterator[None]:
    """Nothing of a run stays on a cluster that it did not start."""
    yield
    import time

    # The public state API asks the dashboard, which is not there.
    from ray._private import state
    from ray.util import placement_group_table

    def left() -> list[str]:
        actors = [f"actor {a['ActorClassName']}" for a in state.actors().values() if a["State"] != "DEAD"]
        groups = [f"placement group {g['name']}" for g in placement_group_table().values() if g["state"] != "REMOVED"]
        return actors + groups

    # Ray ends the children of an actor that died in its own time.
    end = time.monotonic() + 30
    while left() and time.monotonic() < end:
        time.sleep(0.5)
    assert left() == []
