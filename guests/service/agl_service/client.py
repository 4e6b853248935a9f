"""The agents' side of a training server: uploads tasks, starts or joins a run, and executes its rollouts."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic_core import to_jsonable_python

from agl.agents.agent import Agent, FunctionAgent, as_agent
from agl.errors import ConfigError, DatasetError, ServiceError
from agl.rewards.air import air as process_air
from agl.trainer.algorithms.options import RUN_OPTIONS, Settings
from agl.trainer.http.aio import run_in_thread
from agl.trainer.http.auth import CLIENT_VARIABLE
from agl.trainer.http.local_key import split_key
from agl.trainer.report.progress import Progress
from agl.trainer.run.config import require_positive
from agl.trainer.run.data import check_tasks, read_tasks
from agl.trainer.runners.remote.worker import run_worker
from agl.trainer.wire.client import Connection, Unreachable

log = logging.getLogger("agl.client")

URL = "http://127.0.0.1:8000"
SERVER_VARIABLE = "AGENT_LIGHTNING_SERVER_URL"
"""The environment variable with the server's address."""
N_WORKERS = 4
REACH_SECONDS = 30.0
"""How long to try to reach a server."""
LOST_SECONDS = 600.0
"""How long a server may be unreachable during a run."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run.

    Attributes:
        run_id: identifies the run.
        status: "succeeded" or "stopped".
        history: one dict per step: "step", "train/reward", "val/reward" where there was a validation, ...
        policies: by name, the trained policies' directories on the server.
    """

    run_id: str
    status: str
    history: list[dict[str, Any]]
    policies: dict[str, str]
    _client: Client = field(repr=False)

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [h["train/reward"] for h in self.history if "train/reward" in h]

    @property
    def policy(self) -> str | None:
        """The trained policy's directory on the server; None unless there is exactly one."""
        return next(iter(self.policies.values())) if len(self.policies) == 1 else None

    def download(self, directory: str | Path, policy: str | None = None) -> Path:
        """Copy a trained policy here, as a Hugging Face directory.

        Args:
            directory: the destination; created if missing.
            policy: its name; the only policy if None.

        Raises:
            ServiceError: there is no such policy, or the server cannot be reached.
        """
        names = list(self.policies)
        if policy is None and len(names) != 1:
            raise ServiceError(f"the run has {len(names)} policies", hint=f"name one of {', '.join(names) or 'none'}")
        return self._client._download(self.run_id, policy or names[0], Path(directory))


class Client:
    """A training server (`agl serve`) from the machine of the agents.

    Args:
        url: the server's address; AGENT_LIGHTNING_SERVER_URL, or port 8000 of this machine, if None.
        key: the operator's, if the server needs one; otherwise from the URL (`http://:KEY@host:8000`) or AGL_KEY,
            or the one that a server of this user on this machine has made for itself.
        progress: show progress.
    """

    def __init__(self, url: str | None = None, key: str | None = None, *, progress: bool = True) -> None:
        address = url or os.environ.get(SERVER_VARIABLE) or URL
        parts = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{address!r} is not a server's address", hint="for example http://127.0.0.1:8000")
        host = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{host}{parts.path}".rstrip("/")
        self.key = (key or split_key(parts.geturl())[1] or os.environ.get(CLIENT_VARIABLE) or "").strip() or None
        self.progress = progress

    # -- data -----------------------------------------------------------------------------------------------------
    def upload_data(
        self, train: str | Path | Iterable[Any], test_file: str | Path | Iterable[Any] | None = None
    ) -> dict[str, int]:
        """Upload the tasks, which replace those of an earlier upload.

        Args:
            train: a JSON Lines file, or tasks (JSON values, usually dicts).
            test_file: the same, for validation.

        Returns:
            How many tasks the server has, by "train" and "test".

        Raises:
            DatasetError: a task is wrong; names file, line and field. Nothing was uploaded.
            ServiceError: the server cannot be reached, or refuses.
        """
        tasks = {"train": _tasks(train, "train"), "test": None if test_file is None else _tasks(test_file, "test_file")}
        run_in_thread(self._upload(tasks))
        return run_in_thread(self._request("GET", "/data"))

    async def _upload(self, tasks: Mapping[str, tuple[str, list[Any]] | None]) -> None:
        for split, upload in tasks.items():
            if upload is None:
                await self._request("DELETE", f"/data/{split}")
                continue
            name, values = upload
            lines = b"".join(orjson.dumps(value) + b"\n" for value in values)
            query = urllib.parse.urlencode({"name": name})
            await self._request("PUT", f"/data/{split}?{query}", lines, "application/x-ndjson")

    # -- training -------------------------------------------------------------------------------------------------
    def train(self, agent: Any, n_workers: int | None = None, *, resume: bool = False, **settings: Any) -> TrainResult:
        """Train the agent on the uploaded tasks, and return when done. A current run is joined.

        Ctrl-C ends the workers of this process; the run waits for others, or for another call of this.

        Args:
            agent: a function `agent(resource, task) -> float`, or what `agl.wrap`, `@agl.rollout` and `LitAgent` make.
            n_workers: rollouts that run at once; if None, the server's setting, or 4. `nworkers` is its earlier name.
            resume: resume the last run, which was stopped or failed.
            **settings: of the run; they override the server's: algorithm, epochs, steps, batch_size, learning_rate, ...

        Raises:
            ConfigError: an option that does not exist, or a value that it cannot take.
            DatasetError: there are no tasks.
            ServiceError: the server cannot be reached, there is another current run, or the run failed.
            RolloutError: the server could not be reached for too long.
        """
        runnable = client_agent(agent)
        if (earlier := settings.pop("nworkers", None)) is not None:
            if n_workers is not None:
                raise ConfigError("n_workers is set twice: nworkers sets it, too", hint="leave one of them out")
            n_workers = earlier
        options = Settings.of(settings, "train()", known=sorted(RUN_OPTIONS))
        require_positive(n_workers=n_workers)
        values = to_jsonable_python(dict(options.values))
        return run_in_thread(self._train(runnable, n_workers, {"settings": values, "join": True, "resume": resume}))

    async def _train(self, agent: Agent, n_workers: int | None, body: dict[str, Any]) -> TrainResult:
        run = await self._request("POST", "/train", orjson.dumps(body))
        run_id = run["run_id"]
        workers = n_workers or run["nworkers"] or N_WORKERS
        air = None
        if run["air"] == "client":
            air = process_air
            air.require()
        progress = Progress(self.progress)
        progress.note(f"{run_id} on {self.url}: {workers} of {agent.name} at once; after Ctrl-C it can be resumed")
        over = asyncio.Event()
        following = asyncio.ensure_future(self._follow(run_id, progress))
        following.add_done_callback(lambda _: over.set())
        working = asyncio.ensure_future(
            run_worker(agent, self.url, key=self.key, n_workers=workers, until=over, air=air)
        )
        try:
            await asyncio.wait((following, working), return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not following.done():
                working.result()
            run = await following
            await working
        finally:
            progress.stop()
            for task in (following, working):
                task.cancel()
            await asyncio.gather(following, working, return_exceptions=True)
        if run["status"] == "failed":
            raise ServiceError(f"run {run_id} failed on the server: {run['error']}", hint=run["hint"])
        run = await self._request("GET", f"/runs/{run_id}/result")
        return TrainResult(run_id, run["status"], run["history"], run["policies"], self)

    def run(self, run_id: str = "latest") -> dict[str, Any]:
        """The state of a run on the server, with its history.

        Raises:
            ServiceError: there is no such run.
        """
        return run_in_thread(self._request("GET", f"/runs/{urllib.parse.quote(run_id, safe='')}"))

    def stop(self, run_id: str = "latest") -> dict[str, Any]:
        """End a run at its last completed step; `train(agent, resume=True)` resumes it."""
        return run_in_thread(self._request("POST", f"/runs/{urllib.parse.quote(run_id, safe='')}/stop"))

    def _download(self, run_id: str, policy: str, directory: Path) -> Path:
        async def load() -> None:
            base = f"/runs/{run_id}/policies/{urllib.parse.quote(policy, safe='')}"
            async with self._connection() as connection:
                files = (await connection.request("GET", base))["files"]
                directory.mkdir(parents=True, exist_ok=True)
                for name in files:
                    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
                        raise ServiceError(
                            f"the policy has a file {name!r}, which does not belong to a model", run=run_id
                        )
                    await connection.repeated(functools.partial(save, connection, f"{base}/{name}", name))

        async def save(connection: Connection, path: str, name: str) -> None:
            part = directory / f".{name}.part"
            async with connection.stream("GET", path) as response:
                with part.open("wb") as file:
                    async for chunk in response.aiter_bytes():
                        file.write(chunk)
            part.replace(directory / name)

        run_in_thread(load())
        return directory

    # -- HTTP -----------------------------------------------------------------------------------------------------
    def _connection(self, seconds: float = REACH_SECONDS) -> Connection:
        key = "give the operator's key: agl.Client(url, key=...), or AGL_KEY in the environment"
        hint = "check that `agl serve` runs there, and its address, port and key"
        return Connection(
            self.url,
            self.key,
            name="the server",
            error=ServiceError,
            hint=hint,
            hints={401: key, 403: key},
            log=log,
            retry_seconds=seconds,
        )

    async def _request(
        self, method: str, path: str, content: bytes | None = None, content_type: str = "application/json"
    ) -> Any:
        """The response's JSON.

        Raises:
            AglError: the error that the server sent.
        """
        async with self._connection() as connection:
            return await connection.request(method, path, content, content_type=content_type)

    async def _follow(self, run_id: str, progress: Progress) -> dict[str, Any]:
        """Show a run's progress until it ends; its final state. Waits for a server that cannot be reached."""
        seen = -1
        started = False
        lost_since = 0.0
        async with self._connection(LOST_SECONDS) as connection:
            while True:
                try:
                    async for name, number, data in _events(connection, run_id, seen):
                        lost_since = 0.0
                        if name == "end":
                            return data
                        if name == "state" and not started and data["steps"]:
                            progress.start(data["steps"], max(0, data["step"]))
                            started = True
                        if name == "step" and number > seen:
                            seen = number
                            if started and "train/reward" in data:
                                progress.step(data)
                except Unreachable as error:
                    log.debug("events: %s", error)
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > LOST_SECONDS:
                    raise ServiceError(
                        f"the server at {self.url} could not be reached for {LOST_SECONDS:g} s",
                        hint="start it again with the same --directory, and call train() again: the run is resumed",
                    )
                await asyncio.sleep(1.0)


async def _events(connection: Connection, run_id: str, seen: int) -> AsyncIterator[tuple[str, int, Any]]:
    """Server-sent events: (name, id, data)."""
    headers = {"last-event-id": str(seen)} if seen >= 0 else {}
    async with connection.stream("GET", f"/runs/{run_id}/events", headers=headers) as response:
        name = "message"
        number = -1
        data = ""
        async for line in response.aiter_lines():
            field_name, _, value = line.partition(": ")
            if field_name == "event":
                name = value
            elif field_name == "id":
                number = int(value)
            elif field_name == "data":
                data = value
            elif not line and data:
                yield name, number, orjson.loads(data)
                name = "message"
                number = -1
                data = ""


def client_agent(value: Any) -> Agent:
    """The `Agent` for an argument of `Client.train`.

    A function with two arguments, whatever their names, gets the resource as the first and the task as the second.

    Raises:
        ConfigError: the value cannot be run.
    """
    if inspect.isfunction(value) or inspect.ismethod(value):
        required = [
            p
            for p in inspect.signature(value).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        known = {"resource", "resources", "task", "llm", "rollout", "prompt_template"}
        if len(required) == 2 and not known & {p.name for p in required}:
            return _with_positional_arguments(value)
    return as_agent(value)


def _with_positional_arguments(function: Callable[..., Any]) -> Agent:
    if inspect.iscoroutinefunction(function):

        async def run_async(resource: Any, task: Any) -> Any:
            return await function(resource, task)

        return FunctionAgent(run_async, function.__name__).agent

    def run(resource: Any, task: Any) -> Any:
        return function(resource, task)

    return FunctionAgent(run, function.__name__).agent


def _tasks(source: str | Path | Iterable[Any], argument: str) -> tuple[str, list[Any]]:
    """(name for errors, tasks) of an argument of `upload_data`."""
    if isinstance(source, str | Path):
        return Path(source).name, read_tasks(source)
    tasks = list(source)
    if not tasks:
        raise DatasetError(f"{argument} is empty", hint="give at least one task: any JSON value, usually a dict")
    for number, task in enumerate(tasks, start=1):
        try:
            orjson.dumps(task)
        except TypeError as error:
            raise DatasetError(f"task {number} is not JSON: {error}", path=argument, line=number) from None
    check_tasks(tasks, argument)
    return argument, tasks
