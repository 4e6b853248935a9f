"""A server's data and runs: clients upload tasks; one run at a time, which a restarted server resumes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic_core import to_jsonable_python

from agl.errors import AglError, ConfigError, DatasetError, nearest
from agl.trainer.algorithms.options import RUN_OPTIONS, Settings
from agl.trainer.http.limits import Refused
from agl.trainer.run.checkpoints import write_atomically
from agl.trainer.run.config import LOOPBACK
from agl.trainer.run.data import parse_tasks, read_tasks
from agl.trainer.run.lock import lock_directory
from agl.trainer.run.trainer import Trainer
from agl.trainer.store.base import Store
from agl_service.gateway_mount import GatewayMount
from agl_service.run_record import ProgressStream, RunRecord, load_records

log = logging.getLogger("agl.service")

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


class Service:
    """Data and runs behind the HTTP routes, on one event loop.

    Args:
        settings: the server's.
        store: not closed by the service.
        mount: makes runs reachable.
        out: the directory of data and runs.
        progress: whether this terminal shows runs.
    """

    def __init__(self, settings: Settings, store: Store, mount: GatewayMount, out: Path, *, progress: bool) -> None:
        self.settings = settings
        self.store = store
        self.mount = mount
        self.out = out
        self.progress = progress
        self.records: dict[str, RunRecord] = {}
        self.streams: dict[str, ProgressStream] = {}
        self.ending = False
        self._lock: Any = None
        self._task: asyncio.Task[None] | None = None

    # -- the server -----------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Lock the directory and load its runs.

        Raises:
            ConfigError: another server uses the directory.
            CheckpointError: it cannot be read.
        """
        self.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_directory(self.out)
        for record in load_records(self.out / "runs"):
            self.records[record.run_id] = record
            self.streams[record.run_id] = ProgressStream(record, self.progress)

    def resume(self) -> None:
        """Resume the run that was running when the previous server ended."""
        unfinished = [r for r in self.records.values() if not r.over]
        if unfinished and self.settings.get("algorithm") is not None:
            self._start(unfinished[-1], resume=True)

    async def close(self) -> None:
        """End the run at its last completed step; the next server resumes it. Idempotent."""
        self.ending = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for stream in self.streams.values():
            stream.notify()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- data -----------------------------------------------------------------------------------------------------
    def data_file(self, split: str) -> Path:
        """The file of a split's tasks.

        Raises:
            Refused: there is no such split.
        """
        if split not in SPLITS:
            raise Refused(404, f"there is no split {split!r}; there are {', '.join(SPLITS)}", "not_found")
        return self.out / "data" / f"{split}.jsonl"

    def upload(self, split: str, text: str, name: str) -> int:
        """Store tasks, which replace those of an earlier upload; how many.

        Raises:
            DatasetError: a line is wrong. Refused: there is no such split.
        """
        file = self.data_file(split)
        tasks = parse_tasks(text, name)
        write_atomically(file, "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tasks))
        return len(tasks)

    def drop(self, split: str) -> None:
        """Delete the tasks of a split.

        Raises:
            Refused: there is no such split.
        """
        self.data_file(split).unlink(missing_ok=True)

    def data(self) -> dict[str, int]:
        """How many tasks there are, by split."""
        return {s: len(read_tasks(f)) if (f := self.data_file(s)).is_file() else 0 for s in SPLITS}

    # -- runs -----------------------------------------------------------------------------------------------------
    @property
    def current(self) -> RunRecord | None:
        """The running run, if any."""
        return next((r for r in self.records.values() if not r.over), None)

    def find(self, run_id: str) -> RunRecord:
        """A run by its id; "latest" is the last one.

        Raises:
            Refused: there is none.
        """
        if run_id == "latest" and self.records:
            return list(self.records.values())[-1]
        if run_id not in self.records:
            raise Refused(404, f"there is no run {run_id!r}", "run_not_found")
        return self.records[run_id]

    def train(self, options: Mapping[str, Any], *, join: bool = False, resume: bool = False) -> RunRecord:
        """Start a run, or join the current one.

        Args:
            options: of the run; they override the server's.
            join: return the current run if its options agree.
            resume: resume the last run, which was stopped or failed.

        Raises:
            ConfigError, DatasetError: the options or the data are wrong.
            Refused: 409, there is a current run already, or none to resume.
        """
        if self.settings.get("algorithm") is None and "algorithm" not in options:
            raise ConfigError(
                "this server was started without an algorithm", hint='agl serve --algorithm grpo, or algorithm="grpo"'
            )
        settings = Settings.of(options, "train()", known=sorted(RUN_OPTIONS))
        current = self.current
        if current is not None:
            differing = [k for k, v in settings.values.items() if to_jsonable_python(v) != current.settings.get(k)]
            if join and not differing:
                return current
            detail = f", with {', '.join(f'{k}={current.settings.get(k)!r}' for k in differing)}" if differing else ""
            raise Refused(
                409,
                f"run {current.run_id} is running, at step {current.step} of {current.steps or '?'}{detail}; "
                f"stop it first (POST /runs/{current.run_id}/stop), or join it",
                "run_goes_on",
            )
        if resume:
            record = self.find("latest")
            if record.status == "succeeded":
                raise Refused(409, f"run {record.run_id} has succeeded; start another", "run_over")
            record.status = "running"
            record.error = None
            record.hint = None
            record.ended_at = None
            self._start(record, resume=True)
            return record
        return self._new(self.settings.under(settings))

    async def stop(self, run_id: str) -> RunRecord:
        """End a run at its last completed step; it can be resumed."""
        record = self.find(run_id)
        if not record.over and self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if not record.over:
            record.status, record.ended_at = "stopped", time.time()
            self.streams[record.run_id].save()
        return record

    def _new(self, settings: Settings) -> RunRecord:
        algorithm = settings.algorithm()
        if not self.data_file("train").is_file():
            raise DatasetError(
                "there are no tasks to train on", hint="client.upload_data(train), or agl serve --data train.jsonl"
            )
        run_id = f"run-{uuid.uuid4().hex[:8]}"
        directory = self.out / "runs" / run_id
        directory.mkdir(mode=0o700, parents=True)
        for split in SPLITS:
            if self.data_file(split).is_file():
                shutil.copyfile(self.data_file(split), directory / f"{split}.jsonl")
        data = self.data()
        air = None
        if settings.get("air"):
            air = "server" if self.settings.get("air_rules") else "client"
        record = RunRecord(
            run_id,
            directory,
            {k: to_jsonable_python(v) for k, v in settings.values.items() if k in RUN_OPTIONS},
            air=air,
            nworkers=settings.values.get("n_workers"),
            tasks=(data["train"], data["test"]),
            number=1 + max((known.number for known in self.records.values()), default=0),
        )
        record.steps = algorithm.steps
        record.save()
        self.records[run_id] = record
        self._start(record, resume=False)
        return record

    def _start(self, record: RunRecord, *, resume: bool) -> None:
        stream = self.streams[record.run_id] = ProgressStream(record, self.progress)
        record.save()
        self._task = asyncio.ensure_future(self._train(record, stream, resume=resume))

    async def _train(self, record: RunRecord, stream: ProgressStream, *, resume: bool) -> None:
        try:
            settings = self.settings.under(Settings.of(record.settings, f"run {record.run_id}"))
            trainer = self._trainer(record, settings)
            test = record.directory / "test.jsonl"
            result = await trainer.fit_async(
                None,
                read_tasks(record.directory / "train.jsonl"),
                read_tasks(test) if test.is_file() else None,
                resume=resume,
                run_id=record.run_id,
                serve=self.mount.point,
                progress=stream,
            )
        except AglError as error:
            record.fail(error)
            stream.note(str(error))
        except Exception as error:
            record.fail(error)
            log.exception("run %s failed", record.run_id)
        else:
            record.history[:] = result.history
            record.status, record.ended_at, record.eta_seconds = "succeeded", time.time(), 0.0
            record.policies = {name: str(path) for name, path in result.policies.items()}
            stream.note(f"run {record.run_id} is done: {', '.join(record.policies.values())}")
        finally:
            with contextlib.suppress(OSError):
                stream.save()

    def _trainer(self, record: RunRecord, settings: Settings) -> Trainer:
        return Trainer(
            settings.algorithm(),
            **settings.run_options()
            | {
                "air": record.air == "server",
                "store": self.store,
                "directory": record.directory,
                "runners": "remote",
                "host": LOOPBACK,
            },
        )

    def policy_file(self, run_id: str, policy: str, name: str | None = None) -> Path:
        """A trained policy's directory, or a file in it.

        Raises:
            Refused: there is none.
        """
        record = self.find(run_id)
        if policy not in record.policies:
            raise Refused(404, f"run {run_id} has no trained policy {policy!r}", "policy_not_found")
        root = Path(record.policies[policy])
        if name is None:
            return root
        known = {f.name for f in root.iterdir() if f.is_file()}
        if name not in known:
            raise Refused(404, f"{name!r}: {nearest(name, known)}", "file_not_found")
        return root / name
