"""The loggers of Weights & Biases, MLflow, TensorBoard and Trackio.

Invariant: a step is in a tracker once, also where a run was killed and does steps again that it had logged before.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from agl.errors import ConfigError
from agl.trainer.loggers.base import Sample, Tracker

PROJECT = "agl"
"""The project or experiment of runs that name none."""

_RUN_ID = "agl.run_id"


@dataclass(kw_only=True)
class WandB(Tracker):
    """Weights & Biases. A resumed run continues the same run there.

    wandb itself drops steps that the run has already. Offline, a resumed run is a second folder with the same id:
    sync them in the order of their names.

    Attributes:
        project: "agl" if None.
        name: the run's id if None.
        entity: the team; your own if None.
        mode: "online", "offline" or "disabled"; WANDB_MODE if None.
        directory: where its files go; the run's directory if None.

    Raises:
        ConfigError: not installed, or neither logged in nor offline.
    """

    name_in_log: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"

    project: str | None = None
    name: str | None = None
    entity: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    directory: Path | None = None
    _run: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        import wandb

        # wandb would ask on the terminal, in a thread and in the middle of the run.
        mode = self.mode or wandb.setup().settings.mode
        if mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "the logger 'wandb' is not logged in",
                hint="run `wandb login` or set WANDB_API_KEY; WANDB_MODE=offline keeps everything on this machine",
            )

    def start(self, run_id: str, config: Mapping[str, Any], resumed_from: int | None) -> None:
        import wandb

        # Prints of agents, the code, its changes and the command line are texts, too: none of them is sent. Its file is
        # written every second, so that a killed run loses no more.
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            silent=True,
            x_transaction_log_flush_interval=1.0,
        )
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            id=run_id,
            project=self.project or PROJECT,
            name=self.name or run_id,
            entity=self.entity,
            mode=self.mode,
            dir=self.directory,
            config=dict(config),
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        import wandb

        table: dict[str, Any] = {}
        if samples:
            rows = [_row(sample) for sample in samples]
            table["samples"] = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({**metrics, "step": step, **table}, step=step, commit=True)

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "succeeded" else 1)


@dataclass(kw_only=True)
class MLflow(Tracker):
    """MLflow. A resumed run continues the run that has its id in the tag "agl.run_id".

    In a metric's name "_" stands for what MLflow does not allow, and in a folder of files, where "train/reward" cannot
    be next to "train/reward/correct", "." for "/".

    Attributes:
        project: the experiment; "agl" if None.
        name: the run's id if None.
        tracking_uri: a server or database; MLFLOW_TRACKING_URI or MLflow's own default if None.
    """

    name_in_log: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow.tracking"
    package: ClassVar[str] = "mlflow-skinny"

    project: str | None = None
    name: str | None = None
    tracking_uri: str | None = None
    _client: Any = field(default=None, init=False, repr=False)
    _run_id: str = field(default="", init=False, repr=False)
    _last: int = field(default=-1, init=False, repr=False)

    def start(self, run_id: str, config: Mapping[str, Any], resumed_from: int | None) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        client = self._client = MlflowClient(tracking_uri=self.tracking_uri)
        project = self.project or PROJECT
        known = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if known is None else known.experiment_id
        found = client.search_runs([experiment], f"tags.`{_RUN_ID}` = '{run_id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            # MLflow adds a second value to a step that has one already.
            self._last = max((m.step for m in client.get_metric_history(self._run_id, "step")), default=-1)
            client.update_run(self._run_id, status="RUNNING")
            return
        run = client.create_run(experiment, tags={_RUN_ID: run_id}, run_name=self.name or run_id)
        self._run_id = run.info.run_id
        params = [Param(key, text[:6000]) for key, text in _flat(config)]
        for begin in range(0, len(params), 100):  # the most that MLflow takes at once
            client.log_batch(self._run_id, params=params[begin : begin + 100])

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        from mlflow.entities import Metric

        if step <= self._last:
            return
        now = int(time.time() * 1000)
        # "step" goes last: a batch that was cut short is logged again.
        values = [Metric(self._allowed(name), x, now, step) for name, x in [*metrics.items(), ("step", step)]]
        for begin in range(0, len(values), 1000):  # the most that MLflow takes at once
            self._client.log_batch(self._run_id, metrics=values[begin : begin + 1000])
        if samples:
            rows = [_row(sample) for sample in samples]
            self._client.log_text(self._run_id, json.dumps(rows, indent=1), f"samples/step-{step:06d}.json")

    def _allowed(self, name: str) -> str:
        files = "://" not in self._client.tracking_uri or self._client.tracking_uri.startswith("file:")
        return re.sub(r"[^\w./ :-]", "_", name.replace("/", ".") if files else name)

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        names = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
        self._client.set_terminated(self._run_id, names[status])


@dataclass(kw_only=True)
class TensorBoard(Tracker):
    """Event files for TensorBoard, written by tensorboardX.

    Attributes:
        directory: where the files go; "tensorboard" in the run's directory if None.
    """

    name_in_log: ClassVar[str] = "tensorboard"
    module: ClassVar[str] = "tensorboardX"
    package: ClassVar[str] = "tensorboardX"

    directory: str | Path | None = None
    _writer: Any = field(default=None, init=False, repr=False)

    def for_run(self, project: str | None, name: str | None, directory: Path) -> TensorBoard:
        return super().for_run(project, name, directory / "tensorboard")

    def start(self, run_id: str, config: Mapping[str, Any], resumed_from: int | None) -> None:
        from tensorboardX import SummaryWriter

        # TensorBoard then leaves out what earlier files have of the steps that are done again.
        purge = None if resumed_from is None else resumed_from + 1 if resumed_from else 0
        suffix = f".{time.time_ns()}"  # names end in seconds, and a run may be resumed within one
        self._writer = SummaryWriter(str(self.directory), purge_step=purge, filename_suffix=suffix)
        text = json.dumps({"run": run_id, **config}, indent=1)
        self._writer.add_text("config", f"```json\n{text}\n```", resumed_from or 0)

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for i, sample in enumerate(samples):
            self._writer.add_text(f"samples/{i}", f"```json\n{json.dumps(_row(sample), indent=1)}\n```", step)
        self._writer.flush()

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        self._writer.close()


@dataclass(kw_only=True)
class Trackio(Tracker):
    """Trackio, which keeps runs on this machine unless TRACKIO_SPACE_ID or `space_id` names a Hugging Face Space.

    Attributes:
        project: "agl" if None.
        name: followed by the run's id, by which a resumed run is found.
        space_id: a Space that the metrics go to.
    """

    name_in_log: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"
    package: ClassVar[str] = "trackio"

    project: str | None = None
    name: str | None = None
    space_id: str | None = None
    _run: Any = field(default=None, init=False, repr=False)
    _last: int = field(default=-1, init=False, repr=False)

    def start(self, run_id: str, config: Mapping[str, Any], resumed_from: int | None) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=self.project or PROJECT,
            name=f"{self.name} {run_id}" if self.name else run_id,
            space_id=self.space_id,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if resumed_from is not None:
            # Trackio adds a second row to a step that has one already, and no public name says which it has.
            last = self._run._safe_get_max_step_for_run()
            self._last = -1 if last is None else last

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        import pandas
        import trackio  # pyright: ignore[reportMissingImports]

        if step <= self._last:
            return
        table = {"samples": trackio.Table(dataframe=pandas.DataFrame(map(_row, samples)))} if samples else {}
        self._run.log({**metrics, **table}, step=step)

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        self._run.finish()


def _row(sample: Sample) -> dict[str, Any]:
    """A sample as a row of a table: texts and numbers."""
    return {**asdict(sample), "rewards": json.dumps(dict(sample.rewards))}


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted names and texts of all settings."""
    flat: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", json.dumps(value)))
    return flat
