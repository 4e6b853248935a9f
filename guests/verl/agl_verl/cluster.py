"""The Ray cluster that verl trains on: the process's own, that of RAY_ADDRESS, or one started here for the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
import ray.util

from agl.errors import ConfigError
from agl.trainer.runners.ray import join

_GROUP = "verl_group"
_CONTROLLER = ("TransferQueueController", "transfer_queue")


@contextlib.asynccontextmanager
async def connection(init: Mapping[str, Any], *, gpus: Sequence[int]) -> AsyncIterator[None]:
    """Connect to Ray while the block runs; shut it down afterwards if it was started here.

    Args:
        init: `ray.init`'s arguments for a Ray that is started here.
        gpus: how many each policy's trainer needs.

    Raises:
        ConfigError: Ray cannot be reached, has too few GPUs, or another verl run is on it.
    """
    connected = await join(init, log_to_driver=False)
    try:
        _check(gpus)
        yield
    finally:
        if connected:
            await asyncio.to_thread(ray.shutdown)


def _check(gpus: Sequence[int]) -> None:
    available = int(ray.cluster_resources().get("GPU", 0))
    if available < sum(gpus):
        each = f" for each of {len(gpus)} policies" if len(gpus) > 1 else ""
        raise ConfigError(
            f"the run needs {sum(gpus)} GPU(s) (trainer.n_gpus_per_node x trainer.nnodes{each}), and Ray has "
            f"{available}",
            hint="lower gpus=, or join the larger cluster with RAY_ADDRESS",
        )
    try:
        ray.get_actor(_CONTROLLER[0], namespace=_CONTROLLER[1])
    except ValueError:
        return
    raise ConfigError(
        "another verl run is on this Ray cluster: TransferQueue, through which verl moves its rows, has one place per "
        "cluster, and the two would mix theirs",
        hint="wait for it to end, or start a separate Ray for this run (ray.init(address='local'))",
    )


def placement_groups() -> set[str]:
    """Names of verl's placement groups on the cluster."""
    table = ray.util.placement_group_table().values()
    return {g["name"] for g in table if g["state"] != "REMOVED" and _GROUP in g["name"]}


def release_placement_groups(existing: set[str]) -> None:
    """Release the GPUs that verl has reserved, except for the groups `existing`; Ray itself does so only at exit."""
    for name in placement_groups() - existing:
        with contextlib.suppress(ValueError):
            ray.util.remove_placement_group(ray.util.get_placement_group(name))


def log_directory() -> str:
    """Where Ray keeps the logs of its actors on this machine."""
    try:
        return os.path.join(ray._private.worker._global_node.get_session_dir_path(), "logs")  # type: ignore[union-attr]
    except AttributeError:
        return "the logs folder of Ray's session"
