"""Loggers for `agl.Trainer(log=[...])`: known trackers with settings, and the interface of your own logger.

docs/tracking.md has examples and the names of the metrics. Names load on first use.
"""

from agl._lazy import lazy_names

_NAMES = {
    "agl.trainer.loggers.base": ("Logger", "Sample"),
    "agl.trainer.loggers.trackers": ("MLflow", "TensorBoard", "Trackio", "WandB"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
