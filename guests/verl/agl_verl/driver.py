"""One trainer of several: a process that is a Ray job of its own.

verl's servers, its reward worker and the sockets for weights have fixed names per Ray job (`vllm_server_0_0`,
`reward_loop_worker_0`), so two trainers in one job would take each other's. Ray ends the job with this process.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from agl.trainer.processes.child import connection_to_parent
from agl_verl.events import TrainingFailure
from agl_verl.failures import as_agl
from agl_verl.job import TrainerJob


def pack(address: str, runtime_env: Mapping[str, Any], log: str, job: Sequence[Any]) -> bytes:
    """What `main` reads, after its length.

    Args:
        address: of the cluster.
        runtime_env: of the Ray job.
        log: the file for what the process prints.
        job: policy, queue, answers, config and check_ids, as in `agl_verl.trainers.Job`.
    """
    # Handles of actors can only be read once Ray is there.
    data = pickle.dumps((address, dict(runtime_env), log, pickle.dumps(tuple(job))))
    return struct.pack("!Q", len(data)) + data


def main() -> None:
    """Train, and send the run what went wrong; the exit code is 0 whenever that was sent."""
    connection = connection_to_parent()
    with connection.makefile("rb") as file:
        (size,) = struct.unpack("!Q", file.read(8))
        address, runtime_env, log, packed = pickle.loads(file.read(size))
    with Path(log).open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, logging_level=logging.ERROR)
    policy, queue, answers, config, check_ids = pickle.loads(packed)
    job = TrainerJob(policy, queue, answers, shared=True)
    try:
        job.run(config, check_ids)
    except Exception as error:
        traceback.print_exc()
        job.send(TrainingFailure(as_agl(error, log)))


if __name__ == "__main__":
    main()
