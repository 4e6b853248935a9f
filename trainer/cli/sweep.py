"""`agl sweep`: `agl train` with every combination of some settings, for several seeds, and what each comes to."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from agl.errors import ConfigError
from agl.stop_signals import STOP_SIGNALS
from agl.texts import printable
from agl.trainer.launch import child
from agl.trainer.report.explain import PIPED_WIDTH
from agl.trainer.report.statistics import mean_interval
from agl.trainer.report.terminal import console
from agl.trainer.run.checkpoints import write_atomically

TRAIN = (sys.executable, "-c", "from agl.trainer.cli import main; main()", "train")
FACTS = "facts.json"
_STOPPED = {128 + number for number in STOP_SIGNALS}


def sweep(arguments: Sequence[str], over: Sequence[str], seeds: Sequence[int], directory: Path) -> list[dict[str, Any]]:
    """Train, one run after another, and print a table. Runs that ended are not made again, stopped ones are resumed.

    Args:
        arguments: of `agl train`.
        over: NAME=VALUE,VALUE,... each.
        directory: of all runs.

    Returns:
        Of each combination: "settings", "rewards" (the last held-out reward of each seed, or the last step's training
        reward without a validation), "mean", "low" and "high" (Student's 95 % interval over seeds; of one seed that of
        its validation's tasks), "minutes", "directories" (of those that did not fail).

    Raises:
        ConfigError: a setting without values, twice, or one that the sweep sets itself; runs of other arguments are in
            the directory; the first run failed.
        KeyboardInterrupt: Ctrl-C, after the run has saved its checkpoint.
    """
    grid = _grid(over)
    for name in ("--seed", "--directory", "--out", "--resume", "--json"):
        if any(argument.partition("=")[0] == name for argument in arguments):
            raise ConfigError(f"{name} for agl train", hint="leave it out: the sweep sets it for each run")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    runs = [(settings, seed) for settings in combinations for seed in seeds]
    places = [directory / place_of(settings, seed) for settings, seed in runs]
    for place in places:
        if (kept := place / FACTS).is_file() and json.loads(kept.read_text())["arguments"] != [*arguments]:
            raise ConfigError(
                "a run with other options of agl train is there", hint="name another --directory", path=place
            )
    found: list[dict[str, Any]] = [{"settings": s, "runs": [], "directories": []} for s in combinations]
    for number, ((settings, seed), place) in enumerate(zip(runs, places, strict=True)):
        title = f"run {number + 1} of {len(runs)}: {', '.join(_named(settings, seed))}"
        facts = _trained(arguments, settings, seed, place, title)
        if facts is None and number == 0:
            raise ConfigError("the first run failed; no other was tried", hint="its error stands above", path=place)
        row = found[combinations.index(settings)]
        if facts is not None:
            row["runs"].append(facts)
            row["directories"].append(str(place))
    rows = [{"settings": row["settings"], "directories": row["directories"], **_summary(row["runs"])} for row in found]
    _show(rows, list(grid))
    return rows


def place_of(settings: Mapping[str, str], seed: int) -> str:
    """The name of a run's directory."""
    return "_".join(_named(settings, seed))


def _named(settings: Mapping[str, str], seed: int) -> list[str]:
    return [*(f"{name}={value}" for name, value in settings.items()), f"seed={seed}"]


def _grid(over: Sequence[str]) -> dict[str, list[str]]:
    grid: dict[str, list[str]] = {}
    for text in over:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not name or not listed:
            raise ConfigError(f"--over {text}", hint="name a setting and its values: --over learning_rate=1e-5,1e-4")
        if name in grid or len({*listed}) < len(listed):
            raise ConfigError(
                f"--over {text}: {name if name in grid else 'a value'} is there twice", hint="name it once"
            )
        if name in ("seed", "directory"):
            raise ConfigError(f"--over {text}", hint="--seeds N repeats each combination with seeds 0 to N-1")
        grid[name] = listed
    return grid


def _trained(
    arguments: Sequence[str], settings: Mapping[str, str], seed: int, place: Path, title: str
) -> dict[str, Any] | None:
    """What a run has come to; None if it failed.

    Raises:
        KeyboardInterrupt: it was stopped.
    """
    kept = place / FACTS
    print(printable(title), "(is there)" if kept.is_file() else "", file=sys.stderr, flush=True)
    if not kept.is_file():
        place.mkdir(parents=True, exist_ok=True)
        assigned = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        resume = ["--resume"] * (place / "checkpoints").is_dir()
        own = ["--seed", str(seed), "--directory", str(place), "--json", str(place / "result.json"), *resume]
        began = time.monotonic()
        ended = child.run([*TRAIN, *arguments, *assigned, *own], os.environ)
        if ended.exit_status in _STOPPED:
            raise KeyboardInterrupt
        if ended.error is not None:
            return None
        facts = json.loads((place / "result.json").read_text(encoding="utf-8"))
        name = "val/reward" if any("val/reward" in entry for entry in facts["history"]) else "train/reward"
        last = next((e for e in reversed(facts["history"]) if name in e), {})
        ends = {end: last.get(f"{name}_{end}") for end in ("low", "high")}
        short = {
            "arguments": [*arguments],
            "measure": name,
            "reward": last.get(name),
            **ends,
            "minutes": (time.monotonic() - began) / 60,
        }
        # Half of it would end every later sweep of this directory.
        write_atomically(kept, json.dumps(short) + "\n")
    return json.loads(kept.read_text(encoding="utf-8"))


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = [run for run in runs if run["reward"] is not None]
    rewards = [run["reward"] for run in known]
    low, high = (known[0]["low"], known[0]["high"]) if len(known) == 1 else (None, None)
    if len(known) > 1:
        low, high = map(float, mean_interval(rewards))
    return {
        "measure": known[0]["measure"] if known else None,
        "rewards": rewards,
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "low": low,
        "high": high,
        "minutes": [run["minutes"] for run in runs],
    }


def _show(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    measured = next((row["measure"] for row in rows if row["measure"]), "reward")
    table = Table(box=None, pad_edge=False)
    for column in (*names, "seeds", measured, "95 %", "minutes"):
        table.add_column(column, no_wrap=True, justify="left" if column in names else "right")
    for row in sorted(rows, key=lambda row: -(row["mean"] if row["mean"] is not None else -math.inf)):
        mean = "-" if row["mean"] is None else f"{row['mean']:.3f}"
        interval = "-" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        minutes = f"{sum(row['minutes']) / len(row['minutes']):.1f}" if row["minutes"] else "-"
        values = (printable(row["settings"][name]) for name in names)
        table.add_row(*values, str(len(row["rewards"])), mean, interval, minutes)
    out = console()
    if not out.is_terminal:
        out.width = PIPED_WIDTH
    out.print(table)
