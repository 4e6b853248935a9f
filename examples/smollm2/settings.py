"""Which settings of GRPO hold for a real model: SmolLM2-135M, one setting changed at a time, five seeds each.

    python -m examples.smollm2.settings           # 70 runs: hours on two cores; Ctrl-C stops it, the same line goes on
    python -m examples.smollm2.settings --only nothing learning_rate   # 20 of them
    python -m examples.smollm2.settings --table   # of the runs that have ended
    python -m examples.smollm2.settings --save    # keep them in settings.json, whose table docs/hyper-parameters.md has

The agent and the tasks are those of `agl quickstart --real`. Every run begins with the same policy, which has imitated
64 runs of an expert. All settings are run with seed 0 before any is with seed 1. Of a run that has ended the weights
are deleted, which take 2 GB. What settings.json has is not run again if it began with the same policy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import agl
from agl.trainer.cli.sweep import FACTS, place_of, sweep
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.real import SETTINGS, SYSTEM_PROMPT, TEMPLATE, Expert, last_number, products
from agl.trainer.quickstart.smollm2 import smollm2
from agl.trainer.quickstart.tasks import Task
from agl.trainer.report.statistics import mean_interval

agent = build_agent(system_prompt=SYSTEM_PROMPT, max_tokens=64)
IMITATED, TASKS, HELDOUT = 64, 256, 128
STEPS = 4
START = "start.json"
KEPT = Path(__file__).with_name("settings.json")
USUAL = {
    "learning_rate": "2e-5",
    "group_size": "8",
    "batch_size": "8",
    "minibatches": "1",
    "warmup_steps": "0",
    "kl_coef": "0",
}
CHANGES: tuple[dict[str, str], ...] = (
    {},
    *({"learning_rate": rate} for rate in ("5e-6", "1e-5", "5e-5")),
    *({"group_size": group, "batch_size": str(64 // int(group))} for group in ("4", "16")),
    {"batch_size": "4"},
    *({"minibatches": n} for n in ("2", "4")),
    {"warmup_steps": "2"},
    {"kl_coef": "0.01"},
    *({"lora": "16", "learning_rate": rate} for rate in ("5e-5", "2e-4", "5e-4")),
)
"""What differs from `USUAL`, which has 64 rollouts a step. So has each change but that of `batch_size` alone: 32."""


def changed(change: dict[str, str]) -> str:
    """What `--only` calls a change: its first setting, or "nothing"."""
    return next(iter(change), "nothing")


def start(directory: Path, model: str | None, imitated: int, heldout: Sequence[Task]) -> Path:
    """The policy that all runs begin with, made and measured once: the model after one epoch of an expert's runs."""
    policy, made = directory / "start", {"model": model or "SmolLM2", "imitated": imitated}
    if (directory / START).is_file():
        if not made.items() <= json.loads((directory / START).read_text()).items():
            raise SystemExit(f"{directory} holds runs that began with another policy: name another --directory")
    else:
        expert = agl.wrap(build_agent(Expert(), system_prompt=SYSTEM_PROMPT), reward=last_number)
        tasks = products(imitated, seed=1000, split="train")
        agl.Trainer(agl.Baseline(), directory=directory / "expert", seed=0).fit(expert, tasks)
        algorithm = agl.SFT(
            model=model or smollm2(),
            chat_template=TEMPLATE,
            data=agl.traces(directory / "expert"),
            epochs=1,
            batch_size=16,
            learning_rate=2e-5,
            val_before_train=False,
            val_every=10**6,
            **SETTINGS,
        )
        learner = agl.Trainer(algorithm, directory=directory / "imitation", seed=0, n_workers=64)
        result = learner.fit(agl.wrap(agent, reward=last_number), [], heldout)
        shutil.copytree(str(result.policy), policy)
        (directory / START).write_text(
            json.dumps(made | {"reward": result.history[-1]["val/reward"]}), encoding="utf-8"
        )
    return policy


def train(directory: Path, seeds: int, only: Sequence[str], threads: int, *, model: str | None, short: bool) -> None:
    """All runs, or those that change one of `only`, each by `agl sweep`; those that have ended are not made again."""
    chosen = [change for change in CHANGES if not only or changed(change) in only]
    imitated, heldout, steps, changes = (4, 4, 1, CHANGES[-1:]) if short else (IMITATED, HELDOUT, STEPS, chosen)
    files = {"tasks": products(TASKS, seed=1001, split="train"), "val": products(heldout, seed=1001, split="heldout")}
    directory.mkdir(parents=True, exist_ok=True)
    policy = start(directory, model, imitated, files["val"])
    for name, tasks in files.items():
        file, text = directory / f"{name}.jsonl", "".join(f"{json.dumps(task)}\n" for task in tasks)
        if not file.is_file() or file.read_text("utf-8") != text:  # another process's run may be reading it
            file.write_text(text, encoding="utf-8")
    fixed = {
        **SETTINGS,
        "threads": threads,
        "steps": steps,
        "val_every": steps,
        "val_before_train": False,
        "n_workers": 64,
    }
    arguments = [
        *("--model", str(policy), "--agent", f"{__file__}:agent"),
        *("--reward", "agl.trainer.quickstart.real:last_number"),
        *("--tasks", str(directory / "tasks.jsonl"), "--val", str(directory / "val.jsonl")),
        *(part for name, value in fixed.items() for part in ("--set", f"{name}={str(value).lower()}")),
    ]
    kept = ended(KEPT)
    if short or kept.get("start") != found(directory)["start"]:  # another model, or a processor that rounds otherwise
        kept = {}
    for seed, change in itertools.product(range(seeds), changes):
        if (name := place_of(USUAL | change, seed)) not in kept:
            sweep(arguments, [f"{n}={value}" for n, value in (USUAL | change).items()], [seed], directory / "runs")
            for weights in ("policy", "checkpoints"):
                shutil.rmtree(directory / "runs" / name / weights, ignore_errors=True)


def ended(file: Path) -> dict[str, float]:
    """What was kept by `save`: "start", and the names of runs -> held-out reward after the last step."""
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def found(directory: Path) -> dict[str, float]:
    """The same of the runs that have ended in a directory."""
    if not (directory / START).is_file():
        return {}
    rewards = {file.parent.name: json.loads(file.read_text())["reward"] for file in directory.glob(f"runs/*/{FACTS}")}
    return {"start": json.loads((directory / START).read_text())["reward"], **dict(sorted(rewards.items()))}


def save(directory: Path, file: Path) -> None:
    """Add a directory's ended runs to those that a file keeps."""
    kept, more = ended(file), found(directory)
    if not more:
        raise SystemExit(f"{directory} has no run: name the --directory of some")
    if kept and kept["start"] != more["start"]:
        raise SystemExit(f"{directory} began with another policy than the runs of {file.name}")
    file.write_text(json.dumps(kept | more, indent=1) + "\n", encoding="utf-8")


def table(rewards: Mapping[str, float]) -> str:
    """The table in Markdown: held-out reward after the last step, its mean and from three seeds on Student's 95 %
    interval over them."""
    lines = ["| changed | seeds | mean, 95 % | each |", "|---|---|---|---|"]
    if "start" in rewards:
        lines.append(f"| the start | | {100 * rewards['start']:.1f} % | |")
    for change in CHANGES:
        name = place_of(USUAL | change, 0).removesuffix("0")
        percent = [100 * rewards[run] for run in sorted(rewards) if run.startswith(name)]
        if not percent:
            continue
        interval = ""
        if len(percent) > 2:
            low, high = mean_interval(percent)
            interval = f", {max(low, 0.0):.1f} to {min(high, 100.0):.1f}"
        what = ", ".join(f"`{name}={value}`" for name, value in change.items()) or "nothing"
        mean = f"{sum(percent) / len(percent):.1f} %{interval}"
        lines.append(f"| {what} | {len(percent)} | {mean} | {', '.join(f'{r:.0f}' for r in percent)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/settings"))
    parser.add_argument("--model", help="another model than SmolLM2: a directory, a hub id or a GGUF file")
    parser.add_argument("--seeds", type=int, default=5)
    names = list(dict.fromkeys(map(changed, CHANGES)))
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="changes to make (default: all)")
    parser.add_argument("--threads", type=int, default=SETTINGS["threads"], help="of a run, if several share the cores")
    parser.add_argument("--table", action="store_true", help="show what has ended, and train nothing")
    keep = "add what has ended to a file (default: settings.json here), and train nothing"
    parser.add_argument("--save", nargs="?", type=Path, const=KEPT, metavar="FILE", help=keep)
    parser.add_argument("--short", action="store_true", help="one step of the last setting, to see that it runs")
    options = parser.parse_args(argv)
    directory = options.directory.resolve()
    if options.save:
        save(directory, options.save)
    elif not options.table:
        train(directory, options.seeds, options.only, options.threads, model=options.model, short=options.short)
    print(table(ended(options.save) if options.save else found(directory)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same line goes on")
    except agl.AglError as error:
        sys.exit(f"error: {error}")
