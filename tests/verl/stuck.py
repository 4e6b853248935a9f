"""A callback of the user's own, which verl calls before it gives the servers the step's weights."""

from __future__ import annotations

import signal
from typing import Any

import psutil
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback


class Stuck(CheckpointCallback):
    """vLLM's engines no longer answer; the processes are there."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        engines = [p for p in psutil.process_iter() if "EngineCore" in p.name()]
        assert engines
        for process in engines:
            process.send_signal(signal.SIGSTOP)
