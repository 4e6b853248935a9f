"""Write the tables of the examples' READMEs from their kept results; or make those first.

    python -m examples.tables                  # write the tables
    python -m examples.tables --run [NAME ...] # train and evaluate these (else all), seeds 0 and 1, then write them

A result is `examples/NAME/results/SEED.json`, as `python -m examples.NAME --tiny --save` writes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.common import EXAMPLES
from examples.smollm2 import settings

SEEDS = (0, 1)
EXAMPLE = {
    "customer_service": ("Strands", "**assistant**, simulated customer", "database x what had to be said", "GRPO"),
    "distil_then_reinforce": (
        "LangChain", "**solver**", "exact answer", "SFT on a strong model's traces, then GRPO",
    ),
    "calc_x": (
        "Agent Framework, AutoGen", "**MathAgent**", "the answer, to a hundredth", "GRPO",
    ),
    "memory": (
        "LangChain", "**clerk**", "exact answer to what earlier rollouts were told", "GRPO, with `agl.Memory`",
    ),
    "massgen": ("none: MassGen's protocol", "**agent_a**, agent_b", "their votes agree", "GRPO"),
    "rag": ("OpenAI Agents SDK", "**assistant**", "token F1 + 0.1 for the tags", "GRPO"),
    "prompts": ("LangGraph", "sorter, writer: their prompts", "four rules of a house", "GEPA"),
    "games/kuhn": (
        "LangGraph", "**first, second**: two policies, or one", "chips won", "REINFORCE, a baseline per role",
    ),
    "games/werewolf": (
        "LangGraph", "**werewolf, seer, villager**: three policies", "the side's victory, who names the werewolf",
        "REINFORCE, a baseline per role",
    ),
}  # fmt: skip
"""Name -> the columns of the table of all: framework, agents, reward, algorithm."""
START, END = "<!-- table -->", "<!-- /table -->"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="examples; all of them if left out")
    parser.add_argument("--run", action="store_true", help="train and evaluate them first")
    options = parser.parse_args(argv)
    for name in (options.names or EXAMPLE) if options.run else ():
        for seed in SEEDS:
            subprocess.run(
                [sys.executable, "-m", f"examples.{name.replace('/', '.')}", "--tiny", "--save", f"--seed={seed}"],
                check=True,
            )
    for file, text in written().items():
        file.write_text(text, encoding="utf-8")


def written() -> dict[Path, str]:
    """Each README with a table -> its text, with the table as the results have it."""
    kept = {name: results(name) for name in EXAMPLE}
    # One that is not measured by `agl.evaluate` writes its README itself.
    evaluated = [name for name, found in kept.items() if any(result["policies"] for result in found)]
    files = {EXAMPLES / name / "README.md": table(kept[name]) for name in evaluated}
    files[EXAMPLES / "README.md"] = overview()
    files[EXAMPLES / "smollm2" / "README.md"] = smollm2()
    files[EXAMPLES.parent / "docs" / "hyper-parameters.md"] = settings.table(settings.ended(settings.KEPT)) + "\n"
    return {file: _replaced(file.read_text("utf-8"), text) for file, text in files.items()}


def results(name: str) -> list[dict[str, Any]]:
    """The kept results of an example, by seed."""
    found = [json.loads(file.read_text("utf-8")) for file in (EXAMPLES / name / "results").glob("*.json")]
    return sorted(found, key=lambda result: result["seed"])


def table(kept: Sequence[Mapping[str, Any]]) -> str:
    """A row for each seed and policy; the example's own columns are the results' `columns`: policy -> name -> value."""
    more = list(next(iter(kept[0].get("columns", {}).values()), ())) if kept else []
    lines = [
        "| " + " | ".join(("seed | policy | success | 95 % | mean reward | tasks x samples | failed", *more)) + " |",
        "|---" * (7 + len(more)) + "|",
    ]
    for result in kept:
        for name, policy in result["policies"].items():
            success, reward = policy["success"], policy["reward"]
            lines.append(
                f"| {result['seed']} | {name} | {_percent(success['value'])} "
                f"| {_percent(success['low'])} to {_percent(success['high'])} | {reward['value']:.3f} "
                f"| {policy['tasks']} x {policy['samples']} | {policy['failed']} |"
                + "".join(f" {result['columns'][name][column]} |" for column in more)
            )
    minutes = " and ".join(f"{result['minutes']:.1f}" for result in kept)
    return "\n".join(lines) + f"\n\nMinutes of processor time, the policy from scratch included: {minutes}.\n"


def overview() -> str:
    """A row for each example: what it is, and what each seed's policy made of it."""
    lines = [
        "| example | framework | agents (**trained**) | reward | algorithm | before -> after, by seed | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, columns in EXAMPLE.items():
        kept = results(name)
        change = "<br>".join(result.get("summary") or _change(result["policies"]) for result in kept)
        minutes = "<br>".join(f"{result['minutes']:.1f}" for result in kept)
        lines.append(f"| [{name}]({name}) | " + " | ".join((*columns, change, minutes)) + " |")
    return "\n".join(lines) + "\n"


def smollm2() -> str:
    """A row for each run of `examples.smollm2`, from `results/PROGRAM-SEED.json` there."""
    lines = [
        "| program | seed | start | imitated | after GRPO, 95 % | held out | imitated runs | rollouts | minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for file in sorted((EXAMPLES / "smollm2" / "results").glob("*.json")):
        run = json.loads(file.read_text("utf-8"))
        start, *imitated, after = run["measured"]
        device = run.get("device", "CPU")
        lines.append(
            f"| {run['claim']} | {run['seed']} | {_percent(start['reward'])} "
            f"| {''.join(_percent(m['reward']) for m in imitated)} | {_percent(after['reward'])}, "
            f"{_percent(after['reward_low'])} to {_percent(after['reward_high'])} | {run['heldout']} "
            f"| {run['imitated'] or ''} | {run['rollouts']} | {run['minutes']:.0f}"
            f"{'' if device == 'CPU' else f', {device}'} |"
        )
    return "\n".join(lines) + "\n"


def _change(policies: Mapping[str, Any]) -> str:
    return " -> ".join(_percent(policies[name]["success"]["value"]) for name in ("before", "after"))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _replaced(text: str, table: str) -> str:
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{table}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
