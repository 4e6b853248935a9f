"""What `agl train` makes of its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from agl.errors import ConfigError
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.options import Settings, algorithm_class
from agl.trainer.runners.loading import load_rules

STEPS = 200
"""Updates where rollouts are sampled and nothing says how many."""


def configured(
    flags: Mapping[str, Any], assignments: Iterable[str], config: Path | None, data: Sequence[str] | None
) -> tuple[LocalTraining, dict[str, Any]]:
    """The algorithm, and the arguments of `agl.Trainer`.

    Args:
        flags: option -> value, None where it was left out.
        assignments: those of --set.
        config: a YAML file.
        data: the stores to learn from, of which `where` and `per_task` choose.

    Raises:
        ConfigError: an option that does not exist, does not apply to the algorithm, or contradicts another.
    """
    chosen = {name: flags[name] for name in ("where", "per_task")} if data else {}
    flags = {name: value for name, value in flags.items() if name not in chosen}
    settings = Settings.of_command_line(flags, assignments, config, Settings.of({"algorithm": "grpo"}, "agl train"))
    objects = {}
    if data:
        cls = algorithm_class(settings.get("algorithm"), settings.origins["algorithm"])
        if "data" not in {f.name for f in fields(cls)}:
            raise ConfigError(
                f"--data: {cls.__name__} learns from rollouts that it samples", hint="--algorithm sft, or dpo"
            )
        from agl.trainer.traces.stored import traces

        objects["data"] = traces(data, agents=settings.get("agents"), **chosen)
    algorithm = settings.algorithm(STEPS, **objects)
    if settings.get("air_rules"):
        load_rules(settings.get("air_rules"))
    return algorithm, settings.run_options()
