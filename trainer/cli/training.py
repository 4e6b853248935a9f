"""What `agl train` makes of its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from agl.errors import ConfigError, nearest
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.options import Settings, algorithm_class
from agl.trainer.runners.loading import load_rules

STEPS = 200
"""Updates where rollouts are sampled and nothing says how many."""
_GPUS = {"auto": None, "cpu": 0, "cuda": 1}
_FLAGS = (
    "model", "algorithm", "group_size", "batch_size", "steps", "epochs", "learning_rate", "warmup_steps", "schedule",
    "kl_coef", "temperature", "max_response_tokens", "val_every", "lora_rank", "agents", "timeout", "seed", "host",
    "port", "gateways", "store", "max_attempts", "silent_seconds", "credit",
)  # fmt: skip
"""Flags that are named like their options."""


def configured(options: Mapping[str, Any]) -> tuple[LocalTraining, dict[str, Any]]:
    """The algorithm, and what `agl.Trainer` is given.

    Args:
        options: flag -> value, None where it was left out.

    Raises:
        ConfigError: an option that does not exist, does not apply to the algorithm, or contradicts another.
    """
    if options["device"] not in (None, *_GPUS):
        raise ConfigError(f"--device {options['device']}", hint=nearest(options["device"], _GPUS))
    data, where, per_task = options["data"], options["where"], options["per_task"]
    flags = {name: options[name] for name in _FLAGS} | {
        "nworkers": options["workers"],
        "gpus": _GPUS[options["device"] or "auto"],
        "air_enabled": options["air"] or None,
        "out": None if options["out"] is None else str(options["out"]),
    }
    if not data:
        flags |= {"keep": where, "per_task": per_task}
    base = Settings.of({"algorithm": "grpo", "nworkers": 8, "port": 0}, "agl train")
    settings = Settings.of_command_line(flags, options["settings"] or (), options["config"], base)
    objects = {}
    if data:
        cls = algorithm_class(settings.get("algorithm"), settings.origins["algorithm"])
        if "data" not in {f.name for f in fields(cls)}:
            raise ConfigError(
                f"--data: {cls.__name__} learns from rollouts that it samples", hint="--algorithm sft, or dpo"
            )
        from agl.trainer.traces.stored import traces

        objects["data"] = traces(data, where=where, agents=settings.get("agents"), per_task=per_task)
    algorithm = settings.algorithm(STEPS, **objects)
    if settings.get("air_rules"):
        load_rules(settings.get("air_rules"))
    directory = settings.values.get("out")
    return algorithm, {
        **settings.run_options(),
        **{name: options[name] for name in ("runners", "log", "project", "name", "prompts")},
        "air": settings.get("air_enabled"),
        "host": settings.get("host"),
        "store": settings.get("store"),
        "directory": None if directory is None else Path(directory),
    }
