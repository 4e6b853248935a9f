"""verl's trainers: a single one is a Ray actor of the run's job; each of several is a separate Ray job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
import ray.exceptions

from agl.errors import TrainingError
from agl.trainer.processes.child import Child
from agl.trainer.processes.environment import child_environment
from agl_verl import cluster
from agl_verl.config.plan import Plan
from agl_verl.driver import pack
from agl_verl.failures import as_agl
from agl_verl.job import SharedQueue, TrainerJob
from agl_verl.overrides import runtime_env

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What a trainer runs.

    Attributes:
        policy: its name.
        plan, config: what it trains with.
        check_ids: tokens of the weight check.
        queue: takes (policy, event).
        answers: whether training goes on; None if it always does.
    """

    policy: str
    plan: Plan
    config: DictConfig
    check_ids: Sequence[int]
    queue: Any
    answers: Any


class Trainer(Protocol):
    """A running trainer.

    Attributes:
        ended: done when it has, with the error if it died.
    """

    ended: asyncio.Future[None]

    async def stop(self) -> None:
        """End it, with everything that verl has started for it. Idempotent."""
        ...


class Trainers:
    """The trainers of a run.

    Args:
        jobs: one per policy.
        directory: of the run, for the logs of several.

    Attributes:
        ended: policy -> done when its trainer has ended, with the error if it died.
    """

    def __init__(self, jobs: Sequence[Job], directory: Path) -> None:
        self._jobs = jobs
        self._directory = directory
        self._trainers: dict[str, Trainer] = {}
        self._shared_queue: Any = None
        self.ended: dict[str, asyncio.Future[None]] = {}

    async def start(self) -> None:
        """Start them."""
        if len(self._jobs) > 1:
            first = self._jobs[0]
            queue: Any = ray.remote(SharedQueue)
            options = {"num_cpus": 0, "max_restarts": 0, "runtime_env": runtime_env(first.plan)}
            self._shared_queue = queue.options(**options).remote()
            await self._shared_queue.start.remote(first.config.transfer_queue)
        for job in self._jobs:
            trainer = _Actor(job) if len(self._jobs) == 1 else _Driver(job, self._directory)
            self._trainers[job.policy] = trainer
            self.ended[job.policy] = trainer.ended

    async def stop(self) -> None:
        """End them all. Idempotent."""
        await asyncio.gather(*(trainer.stop() for trainer in self._trainers.values()), return_exceptions=True)
        if self._shared_queue is not None:
            await asyncio.to_thread(ray.kill, self._shared_queue)


class _Actor:
    def __init__(self, job: Job) -> None:
        actor: Any = ray.remote(TrainerJob)
        options = {"num_cpus": 1, "max_restarts": 0, "runtime_env": runtime_env(job.plan)}
        self._actor = actor.options(**options).remote(job.policy, job.queue, job.answers)
        self.ended: asyncio.Future[None] = asyncio.ensure_future(
            self._wait(self._actor.run.remote(job.config, job.check_ids))
        )

    async def _wait(self, end: Awaitable[Any]) -> None:
        try:
            await end
        except ray.exceptions.RayTaskError as error:
            failure = as_agl(error, cluster.log_directory())
            raise failure from (None if failure is error.cause else error)
        except ray.exceptions.RayError as error:
            hint = f"see the logs of Ray in {cluster.log_directory()}"
            raise TrainingError(f"verl's trainer died: {error}", hint=hint) from error

    async def stop(self) -> None:
        self.ended.cancel()
        await asyncio.to_thread(ray.kill, self._actor)


class _Driver:
    def __init__(self, job: Job, directory: Path) -> None:
        self._policy = job.policy
        self._log = directory / f"verl-{job.policy}.log"
        environment = _inherited(runtime_env(job.plan))
        # Ray hides the GPUs from actors that request none, as a single trainer is; its workers get theirs from Ray.
        variables = {**environment["env_vars"], "CUDA_VISIBLE_DEVICES": ""}
        # Its name is for those who look at the machine's processes.
        self._child = Child("agl_verl.driver", job.policy, env=child_environment(variables, own_program=True))
        address = ray.get_runtime_context().gcs_address
        arguments = (job.policy, job.queue, job.answers, job.config, job.check_ids)
        self._arguments = pack(address, environment, str(self._log), arguments)
        self.ended: asyncio.Future[None] = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        connection = self._child.connection
        with contextlib.suppress(OSError):  # it may have died before it read them
            await asyncio.to_thread(connection.sendall, self._arguments)
        closed = loop.create_future()
        # It writes nothing: the socket is readable when it is closed, which is when the process ends.
        loop.add_reader(connection, lambda: closed.done() or closed.set_result(None))
        try:
            await closed
        finally:
            loop.remove_reader(connection)
        how = await asyncio.to_thread(self._child.how_it_ended)
        if how != "exit code 0":
            output = self._child.last_output()[-500:]  # from before it wrote to its log
            raise TrainingError(
                f"verl's trainer of policy {self._policy!r} died ({how}){f': {output}' if output else ''}",
                hint=f"see {self._log} and the logs of Ray in {cluster.log_directory()}; resume with resume=True",
                policy=self._policy,
            )

    async def stop(self) -> None:
        self.ended.cancel()
        await asyncio.gather(self.ended, return_exceptions=True)
        await self._child.end()


def _inherited(environment: dict[str, Any]) -> dict[str, Any]:
    """Ray's `runtime_env` of another job, on top of this job's, which actors of this one would inherit."""
    own = dict(ray.get_runtime_context().runtime_env)
    return {**own, **environment, "env_vars": {**own.get("env_vars", {}), **environment["env_vars"]}}
