"""Reads back what trackers wrote: metrics by step, one dict per session of a tracker that keeps several."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Steps = dict[int, dict[str, float]]
"""The metrics of each step by name."""


def history_steps(history: list[dict[str, Any]]) -> Steps:
    """A run's history in that form."""
    return {h["step"]: {name: float(value) for name, value in h.items() if name != "step"} for h in history}


def wandb_sessions(directory: Path) -> tuple[set[str], list[Steps]]:
    """The ids of the runs, and what each offline session logged, in order. A step twice in one is an error."""
    from wandb.proto import wandb_internal_pb2

    ids: set[str] = set()
    sessions: list[Steps] = []
    for path in sorted((directory / "wandb").glob("offline-run-*/*.wandb")):
        steps: Steps = {}
        for data in _leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            step = int(row["step"])
            assert step not in steps
            assert step == record.history.step.num
            steps[step] = {k: v for k, v in row.items() if k != "step" and not k.startswith(("_", "samples"))}
        sessions.append(steps)
    return ids, sessions


def _leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, after the header of wandb's: blocks of 32 KiB, in which each part of a record
    follows its checksum, length and kind (1 whole, 2 first, 3 middle, 4 last)."""
    position, record = 7, b""
    while position + 7 <= len(log):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(log[position + 4 : position + 6], "little"), log[position + 6]
        record += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def mlflow_runs(uri: str, project: str) -> list[tuple[Any, Steps]]:
    """The runs of an experiment and their metrics. A step twice is an error."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None
    found = []
    for run in client.search_runs([experiment.experiment_id]):
        steps: Steps = defaultdict(dict)
        for name in run.data.metrics:
            if name == "step":
                continue
            for metric in client.get_metric_history(run.info.run_id, name):
                assert name not in steps[metric.step], f"{name} of step {metric.step} is there twice"
                steps[metric.step][name] = metric.value
        found.append((run, dict(steps)))
    return found


def tensorboard_steps(directory: Path) -> Steps:
    """What TensorBoard shows. A step twice is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    steps: Steps = defaultdict(dict)
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in steps[event.step], f"{name} of step {event.step} is there twice"
            steps[event.step][name] = event.value
    return dict(steps)


def trackio_steps(project: str, run: str) -> Steps:
    """What Trackio's database has. A step twice is an error."""
    from trackio.sqlite_storage import SQLiteStorage

    steps: Steps = {}
    for row in SQLiteStorage.get_logs(project, run):
        assert row["step"] not in steps
        steps[row["step"]] = {k: v for k, v in row.items() if k not in ("step", "timestamp", "samples")}
    return steps


def bytes_of(directory: Path) -> bytes:
    """All that is below a directory."""
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())
