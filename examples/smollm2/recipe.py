"""How each program of this folder is trained: an expert's runs, if there is one, are imitated; then GRPO."""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import agl
from agl.testing.provider import Script, serve
from agl.trainer.quickstart.smollm2 import smollm2
from examples.common import EXAMPLES, Endpoint

TEMPLATE = "hermes"
NOWHERE = Endpoint("http://127.0.0.1:9/v1", "policy", "unused")
"""Where an agent's calls would go if no policy answered them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An agent, its tasks, and how much of what it takes.

    Attributes:
        build: the wrapped agent, on a provider.
        train: tasks of GRPO. heldout: tasks that measure. recorded: tasks that the expert solves, imitated.
        expert: a script that solves them; None: nothing is imitated.
        others: a script for agents that are not trained. agents: those that are, as `agl.Trainer(agents=)`.
        imitation: settings of `agl.SFT`. steps, batch_size, group_size, learning_rate: of GRPO.
        max_context, max_response_tokens: of both.
        short: how many tasks are imitated, and how many measure, in a short form.
        more: other settings of `agl.Trainer`.
    """

    build: Callable[[Endpoint], Any]
    train: Sequence[Any]
    heldout: Sequence[Any]
    recorded: Sequence[Any] = ()
    expert: Script | None = None
    others: Script | None = None
    agents: Any = None
    imitation: Mapping[str, Any] = field(default_factory=lambda: {"epochs": 1, "batch_size": 16, "learning_rate": 2e-5})
    steps: int = 12
    batch_size: int = 8
    group_size: int = 8
    learning_rate: float = 2e-5
    max_context: int = 512
    max_response_tokens: int = 64
    short: int = 4
    more: Mapping[str, Any] = field(default_factory=dict)


def learn(name: str, claim: Claim, options: argparse.Namespace) -> dict[str, Any]:
    """Train and measure it; what came of it is in `result.json` of the run's directory."""
    started = time.monotonic()
    out: Path = options.out or Path("runs") / f"smollm2-{name}-{options.seed}"
    model = options.model or smollm2()
    n_heldout = claim.short if options.short else len(claim.heldout)
    heldout, steps = claim.heldout[:n_heldout], options.steps or (1 if options.short else claim.steps)
    run: dict[str, Any] = {"n_workers": 64, "seed": options.seed, "agents": claim.agents, **claim.more}
    settings: dict[str, Any] = {
        "max_context": claim.max_context, "max_response_tokens": claim.max_response_tokens,
        "max_tokens_per_microbatch": claim.max_context, "max_batch": 64, "threads": options.threads,
        "autocast": "float32",  # see docs/hyper-parameters.md
    }  # fmt: skip
    history: list[Mapping[str, Any]] = []
    with serve(claim.others or _silent) as rest:
        agent = claim.build(Endpoint(rest.url, "scripted", "none") if claim.others else NOWHERE)
        if claim.expert is not None:
            recorded = claim.recorded[: claim.short] if options.short else claim.recorded
            with serve(claim.expert) as expert:
                strong = claim.build(Endpoint(expert.url, "scripted", "none"))
                agl.Trainer(agl.Baseline(), directory=out / "expert", **run).fit(strong, recorded)
            sft = agl.SFT(
                model=model, chat_template=TEMPLATE,
                data=agl.traces(out / "expert", where=agl.reward() >= 1, agents=claim.agents),
                val_every=10**6, **claim.imitation, **settings,
            )  # fmt: skip
            imitated = agl.Trainer(sft, directory=out / "imitation", **run).fit(agent, [], heldout)
            history += imitated.history
            model = str(imitated.policy)
        grpo = agl.GRPO(
            model=model, chat_template=TEMPLATE if claim.expert is None else None, steps=steps,
            group_size=2 if options.short else claim.group_size, batch_size=1 if options.short else claim.batch_size,
            learning_rate=claim.learning_rate, val_every=steps, val_before_train=claim.expert is None,
            checkpoint_every=steps, **settings,
        )  # fmt: skip
        result = agl.Trainer(grpo, directory=out / "grpo", **run).fit(agent, claim.train, heldout)
    history += result.history
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    facts = {
        "claim": name,
        "seed": options.seed,
        "heldout": n_heldout,
        "measured": [
            {key: entry[f"val/{key}"] for key in ("reward", "reward_low", "reward_high")}
            for entry in history
            if "val/reward" in entry
        ],
        "train": [entry["train/reward"] for entry in result.history if "train/reward" in entry],
        "rollouts": sum(entry.get("train/rollouts", 0) for entry in result.history),
        "imitated": len(claim.recorded),
        "minutes": round(used / 60, 1),
        "elapsed_minutes": round((time.monotonic() - started) / 60, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "store": result.store,
        "policy": str(result.policy),
    }
    (out / "result.json").write_text(json.dumps(facts, indent=1) + "\n")
    if options.save:
        kept = EXAMPLES / "smollm2" / "results"
        kept.mkdir(exist_ok=True)
        public = {key: value for key, value in facts.items() if key not in ("store", "policy")}
        (kept / f"{name}-{options.seed}.json").write_text(json.dumps(public, indent=1) + "\n")
    print(" -> ".join(f"{100 * m['reward']:.1f} %" for m in facts["measured"]), f"of {n_heldout} held-out tasks")
    return facts


def last_number(text: object) -> str | None:
    """The last number of a text, without separators of thousands."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", str(text)))
    return numbers[-1] if numbers else None


def _silent(_: dict[str, Any]) -> Any:
    raise RuntimeError("nothing is asked of it")
