"""The names of `agl.loggers`, for editors and type checkers; `loggers.py` loads the same on first use."""

from agl.trainer.loggers.base import Logger as Logger
from agl.trainer.loggers.base import Sample as Sample
from agl.trainer.loggers.trackers import MLflow as MLflow
from agl.trainer.loggers.trackers import TensorBoard as TensorBoard
from agl.trainer.loggers.trackers import Trackio as Trackio
from agl.trainer.loggers.trackers import WandB as WandB

__all__: list[str]
