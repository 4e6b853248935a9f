"""Settings by the names of MassGen's RL document, and what trains with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from agl.errors import ConfigError, nearest
from agl.options import checked_options

StoreType = Literal["local", "remote"]


@checked_options
@dataclass(frozen=True)
class StoreConfig:
    """Where traces are kept.

    Attributes:
        type: "local", a folder on this machine, or "remote", any other store of agl's.
        path: the folder, which holds the store (`run.db`) and the JSON files that are written from it; of a remote
            store its URL: `http://host:4747` of `agl store`, or `postgresql://...`.
    """

    type: StoreType = "local"
    path: str = "./rl_data"

    def __post_init__(self) -> None:
        if self.type not in get_args(StoreType):
            raise ConfigError(f"StoreConfig(type={self.type!r})", hint=nearest(str(self.type), get_args(StoreType)))
        if (self.type == "remote") != ("://" in str(self.path)):
            raise ConfigError(
                f"StoreConfig(type={self.type!r}, path={self.path!r})",
                hint='path= of a "local" store is a folder, of a "remote" one its URL: http://host:4747',
            )


@checked_options
@dataclass(frozen=True)
class AlgorithmConfig:
    """What trains.

    Attributes:
        algorithm: "lightningrl" (GRPO with a rollout's return credited to each of its calls), or another name that
            `agl train` takes: "rloo", "ppo", "sft", ...
        learning_rate: of AdamW.
        batch_size: tasks, or examples, of a step.
        num_epochs: passes over the tasks.
    """

    algorithm: str = "lightningrl"
    learning_rate: float = 1e-5
    batch_size: int = 32
    num_epochs: int = 10

    def build(self, model: str, **options: Any) -> Any:
        """The algorithm for `agl.Trainer`.

        Args:
            model: Hugging Face directory or hub id. **options: of the algorithm's class; they go before these fields.

        Raises:
            ConfigError: an unknown algorithm or option.
        """
        from agl.trainer.algorithms.options import ALGORITHMS

        if self.algorithm.lower() not in ALGORITHMS:
            hint = "agl.APO and agl.GEPA search prompts" if self.algorithm.lower() in ("apo", "gepa") else None
            raise ConfigError(
                f"AlgorithmConfig(algorithm={self.algorithm!r})", hint=hint or nearest(self.algorithm, ALGORITHMS)
            )
        algorithm = ALGORITHMS[self.algorithm.lower()]
        length = {"epochs": self.num_epochs} if algorithm.timed and "steps" not in options else {}
        mine = {"learning_rate": self.learning_rate, "batch_size": self.batch_size, **length}
        return algorithm(model=model, **mine | options)


@checked_options
@dataclass(frozen=True)
class RLConfig:
    """What is recorded of agents and orchestrators, and how they are trained.

    Attributes:
        enable_rl: False switches everything off.
        collect_only: rewards are recorded, and do not count where `agl.Trainer` trains. False: those that are enabled
            count, each for the call or agent that earned it.
        store_config: where traces are kept that no trainer's rollout holds.
        enable_tool_rewards, enable_answer_quality_rewards, enable_coordination_rewards: which of `RewardComputer`'s
            rewards are computed.
        enable_human_feedback: whether `LightningStore.add_feedback` takes rewards of people.
        algorithm_config: what `trainer` trains with.
        checkpoint_dir: directory of `trainer`'s run: its checkpoints, policy and store.
        log_dir: where `trainer` writes its metrics, one JSON line per step; None for nowhere.
    """

    enable_rl: bool = False
    collect_only: bool = True
    store_config: StoreConfig = field(default_factory=StoreConfig)
    enable_tool_rewards: bool = True
    enable_answer_quality_rewards: bool = True
    enable_coordination_rewards: bool = True
    enable_human_feedback: bool = False
    algorithm_config: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    checkpoint_dir: str = "./rl_checkpoints"
    log_dir: str | None = "./rl_logs"

    def trainer(self, model: str, *, algorithm: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """An `agl.Trainer` with the algorithm and the directories of this config.

        Args:
            model: as in `AlgorithmConfig.build`.
            algorithm: its options. **options: of `agl.Trainer`.

        Raises:
            ConfigError: an unknown option.
        """
        from agl.trainer.run.trainer import Trainer

        log = {} if self.log_dir is None else {"log": JsonLog(Path(self.log_dir))}
        built = self.algorithm_config.build(model, **(algorithm or {}))
        return Trainer(built, **{"directory": self.checkpoint_dir, **log, **options})


class JsonLog:
    """A logger of `agl.Trainer`: a run's metrics as JSON lines in `<run id>.jsonl`.

    Args:
        folder: of the file; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, run_id: str, config: Mapping[str, Any], resumed_from: int | None) -> None:
        """Open the file; steps after the resumed one are logged again, and appear once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / f"{run_id}.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= (resumed_from or 0)]
        self._file.write_text("".join(f"{line}\n" for line in kept))

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Any]) -> None:
        """Write a line."""
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        """Nothing is open."""
