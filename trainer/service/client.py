"""The agents' side of a training server: uploads tasks, starts or joins a run, and executes its rollouts here."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import orjson
from pydantic_core import to_jsonable_python
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from agl import errors
from agl.agents.agent import Agent, FunctionAgent, as_agent
from agl.errors import AglError, ConfigError, DatasetError, ServiceError
from agl.rewards.air import air as process_air
from agl.trainer.http.auth import CLIENT_VARIABLE
from agl.trainer.run.data import check_tasks, read_tasks
from agl.trainer.run.progress import Progress
from agl.trainer.service.settings import RUN_OPTIONS, SERVER_VARIABLE, Settings

log = logging.getLogger("agl.client")

T = TypeVar("T")

URL = "http://127.0.0.1:8000"
N_WORKERS = 4
REACH_SECONDS = 30.0
"""How long a server may be away that was not heard of yet."""
LOST_SECONDS = 600.0
"""How long one may be away in the midst of a run."""
_SILENT_SECONDS = 45.0
"""A stream of events that says nothing for so long is dead."""
_AGAIN = frozenset({408, 425, 429, 502, 503, 504})


class _Away(Exception):
    """The server could not be reached, or is not ready."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to.

    Attributes:
        run_id: of the run. status: "succeeded" or "stopped".
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
        """The trained policy's directory on the server, where there is just one."""
        return next(iter(self.policies.values())) if len(self.policies) == 1 else None

    def download(self, directory: str | Path, policy: str | None = None) -> Path:
        """Copy a trained policy here, as a Hugging Face directory.

        Args:
            directory: where to; made if it is not there. policy: which; the only one if None.

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
        url: the server's; AGENT_LIGHTNING_SERVER_URL, or port 8000 of this machine, if None.
        key: the operator's, if the server asks for one; else from the URL (`http://:KEY@host:8000`) or AGL_KEY.
        progress: show progress.
    """

    def __init__(self, url: str | None = None, key: str | None = None, *, progress: bool = True) -> None:
        given = url or os.environ.get(SERVER_VARIABLE) or URL
        parts = urllib.parse.urlsplit(given if "://" in given else f"http://{given}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{given!r} is not a server's address", hint="for example http://127.0.0.1:8000")
        host = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{host}{parts.path}".rstrip("/")
        self.key = key or parts.password or os.environ.get(CLIENT_VARIABLE)
        self.progress = progress

    # -- data -----------------------------------------------------------------------------------------------------
    def upload_data(
        self, train: str | Path | Iterable[Any], test_file: str | Path | Iterable[Any] | None = None
    ) -> dict[str, int]:
        """Upload the tasks, in place of any before them.

        Args:
            train: a JSON Lines file, or tasks (JSON values, usually dicts). test_file: likewise, for validation.

        Returns:
            How many tasks the server has, by "train" and "test".

        Raises:
            DatasetError: which file, line and field is wrong; nothing was uploaded then.
            ServiceError: the server cannot be reached, or refuses.
        """
        tasks = {"train": _tasks(train, "train"), "test": None if test_file is None else _tasks(test_file, "test_file")}
        _run(self._upload(tasks))
        return _run(self._ask("GET", "/data"))

    async def _upload(self, tasks: Mapping[str, tuple[str, list[Any]] | None]) -> None:
        for split, given in tasks.items():
            if given is None:
                await self._ask("DELETE", f"/data/{split}")
                continue
            name, values = given
            lines = b"".join(orjson.dumps(value) + b"\n" for value in values)
            query = urllib.parse.urlencode({"name": name})
            await self._ask("PUT", f"/data/{split}?{query}", lines, "application/x-ndjson")

    # -- training -------------------------------------------------------------------------------------------------
    def train(self, agent: Any, nworkers: int | None = None, *, resume: bool = False, **settings: Any) -> TrainResult:
        """Train the agent on the uploaded tasks, and return when done. A run that goes on already is joined.

        Ctrl-C ends the workers here; the run waits for others, or for this to be called again.

        Args:
            agent: a function `agent(resource, task) -> float`, or what `agl.wrap`, `@agl.rollout` and `LitAgent` make.
            nworkers: rollouts at once; as the server says if None, or 4.
            resume: go on with the last run, which was stopped or failed.
            **settings: of the run, over the server's: algorithm, epochs, steps, batch_size, learning_rate, ...

        Raises:
            ConfigError: an option that does not exist, or a value that it cannot take.
            DatasetError: there are no tasks.
            ServiceError: the server cannot be reached, another run goes on, or the run failed.
            RolloutError: the server was away for too long.
        """
        runnable = client_agent(agent)
        checked = Settings.of(settings, "train()", known=sorted(RUN_OPTIONS))
        if nworkers is not None and nworkers < 1:
            raise ConfigError(f"nworkers is {nworkers}", hint="give a number above 0")
        values = to_jsonable_python(dict(checked.values))
        return _run(self._train(runnable, nworkers, {"settings": values, "join": True, "resume": resume}))

    async def _train(self, agent: Agent, nworkers: int | None, body: dict[str, Any]) -> TrainResult:
        from agl.trainer.runners.remote.worker import run_worker

        run = await self._ask("POST", "/train", orjson.dumps(body))
        run_id = run["run_id"]
        workers = nworkers or run["nworkers"] or N_WORKERS
        air = None
        if run["air"] == "client":
            air = process_air
            air.require()
        progress = Progress(self.progress)
        progress.note(f"{run_id} on {self.url}: {workers} of {agent.name} at once; after Ctrl-C it can be gone on with")
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
        run = await self._ask("GET", f"/runs/{run_id}/result")
        return TrainResult(run_id, run["status"], run["history"], run["policies"], self)

    def run(self, run_id: str = "latest") -> dict[str, Any]:
        """What the server knows of a run, with its history.

        Raises:
            ServiceError: there is none.
        """
        return _run(self._ask("GET", f"/runs/{urllib.parse.quote(run_id, safe='')}"))

    def stop(self, run_id: str = "latest") -> dict[str, Any]:
        """End a run at its last completed step; `train(agent, resume=True)` goes on with it."""
        return _run(self._ask("POST", f"/runs/{urllib.parse.quote(run_id, safe='')}/stop"))

    def _download(self, run_id: str, policy: str, directory: Path) -> Path:
        async def load() -> None:
            base = f"/runs/{run_id}/policies/{urllib.parse.quote(policy, safe='')}"
            files = (await self._ask("GET", base))["files"]
            directory.mkdir(parents=True, exist_ok=True)
            for name in files:
                if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
                    raise ServiceError(f"the policy has a file {name!r}, which is no model's", run=run_id)
                part = directory / f".{name}.part"
                async with self._client() as client, client.stream("GET", f"{self.url}{base}/{name}") as answer:
                    if answer.status_code != 200:
                        await answer.aread()
                        raise _error(answer)
                    with part.open("wb") as file:
                        async for chunk in answer.aiter_bytes():
                            file.write(chunk)
                part.replace(directory / name)

        _run(self._reach(load, REACH_SECONDS))
        return directory

    # -- HTTP -----------------------------------------------------------------------------------------------------
    def _client(self) -> httpx.AsyncClient:
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key.strip()}"}
        timeout = httpx.Timeout(_SILENT_SECONDS, connect=10.0)
        return httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False)

    async def _ask(self, method: str, path: str, content: bytes | None = None, kind: str = "application/json") -> Any:
        """The answer's JSON.

        Raises:
            AglError: of the kind that the server said.
        """

        async def once() -> Any:
            headers = {} if content is None else {"content-type": kind}
            async with self._client() as client:
                answer = await client.request(method, f"{self.url}{path}", content=content, headers=headers)
            if answer.status_code in _AGAIN:
                raise _Away(f"it answers {answer.status_code}")
            if answer.status_code >= 300:
                raise _error(answer)
            return orjson.loads(answer.content)

        return await self._reach(once, REACH_SECONDS)

    async def _reach(self, once: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Try until the server is there, so long at most."""
        tries = AsyncRetrying(
            retry=retry_if_exception_type((_Away, httpx.TransportError)),
            wait=wait_random_exponential(multiplier=0.1, max=5.0),
            stop=stop_after_delay(seconds),
            reraise=True,
        )
        try:
            async for one in tries:
                with one:
                    return await once()
        except (_Away, httpx.TransportError) as error:
            raise ServiceError(
                f"the server at {self.url} could not be reached for {seconds:g} s: {type(error).__name__}: {error}",
                hint="check that `agl serve` runs there, and its address, port and key",
            ) from None
        raise AssertionError("unreachable")

    async def _follow(self, run_id: str, progress: Progress) -> dict[str, Any]:
        """Show a run's progress until it is over; its facts. A server that is away is waited for."""
        seen, began, away = -1, False, 0.0
        while True:
            try:
                async for name, number, data in self._events(run_id, seen):
                    away = 0.0
                    if name == "end":
                        return data
                    if name == "state" and not began and data["steps"]:
                        progress.start(data["steps"], max(0, data["step"]))
                        began = True
                    if name == "step" and number > seen:
                        seen = number
                        if began and "train/reward" in data:
                            progress.step(data)
            except (httpx.TransportError, _Away) as error:
                log.debug("events: %s", error)
            away = away or time.monotonic()
            if time.monotonic() - away > LOST_SECONDS:
                raise ServiceError(
                    f"the server at {self.url} was away for {LOST_SECONDS:g} s",
                    hint="start it again with the same --out, and call train() again: the run goes on",
                )
            await asyncio.sleep(1.0)

    async def _events(self, run_id: str, seen: int) -> AsyncIterator[tuple[str, int, Any]]:
        """Server-sent events: (name, id, data)."""
        headers = {"last-event-id": str(seen)} if seen >= 0 else {}
        url = f"{self.url}/runs/{run_id}/events"
        async with self._client() as client, client.stream("GET", url, headers=headers) as answer:
            if answer.status_code in _AGAIN:
                raise _Away(f"it answers {answer.status_code}")
            if answer.status_code != 200:
                await answer.aread()
                raise _error(answer)
            name, number, data = "message", -1, ""
            async for line in answer.aiter_lines():
                field_name, _, value = line.partition(": ")
                if field_name == "event":
                    name = value
                elif field_name == "id":
                    number = int(value)
                elif field_name == "data":
                    data = value
                elif not line and data:
                    yield name, number, orjson.loads(data)
                    name, number, data = "message", -1, ""


def client_agent(value: Any) -> Agent:
    """The `Agent` in what is given to `Client.train`: of a function with two arguments, whatever their names, the first
    is the resource and the second the task.

    Raises:
        ConfigError: nothing that can run.
    """
    if inspect.isfunction(value) or inspect.ismethod(value):
        required = [
            p for p in inspect.signature(value).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]  # fmt: skip
        known = {"resource", "resources", "task", "llm", "rollout", "prompt_template"}
        if len(required) == 2 and not known & {p.name for p in required}:
            return _by_place(value)
    return as_agent(value)


def _by_place(function: Callable[..., Any]) -> Agent:
    if inspect.iscoroutinefunction(function):

        async def run_async(resource: Any, task: Any) -> Any:
            return await function(resource, task)

        return FunctionAgent(run_async, function.__name__).agent

    def run(resource: Any, task: Any) -> Any:
        return function(resource, task)

    return FunctionAgent(run, function.__name__).agent


def _tasks(given: str | Path | Iterable[Any], what: str) -> tuple[str, list[Any]]:
    if isinstance(given, str | Path):
        return Path(given).name, read_tasks(given)
    tasks = list(given)
    if not tasks:
        raise DatasetError(f"{what} is empty", hint="give at least one task: any JSON value, usually a dict")
    for number, task in enumerate(tasks, start=1):
        try:
            orjson.dumps(task)
        except TypeError as error:
            raise DatasetError(f"task {number} is not JSON: {error}", path=what, line=number) from None
    check_tasks(tasks, what)
    return what, tasks


def _error(answer: httpx.Response) -> AglError:
    """The error that the server told."""
    try:
        told = orjson.loads(answer.content)["error"]
        kind, message, hint = told["type"], str(told["message"]), told.get("hint")
        where = {k: v for k, v in (told.get("where") or {}).items() if k not in ("message", "hint")}
    except (ValueError, KeyError, TypeError):
        return ServiceError(
            f"the server answers {answer.status_code}: {answer.text[:200]}", hint="is this the URL of `agl serve`?"
        )
    if answer.status_code in (401, 403):
        hint = "give the operator's key: agl.Client(url, key=...), or AGL_KEY in the environment"
    cls = getattr(errors, str(kind), None)
    if not (isinstance(cls, type) and issubclass(cls, AglError)) or cls is errors.StoreError:
        cls = ServiceError
    return cls(message, hint=hint, **where)


def _run(work: Any) -> Any:
    from agl.trainer.http.aio import run_in_thread

    return run_in_thread(work)
