"""What GRPO by agl and by TRL make of the same real model, with the same tasks, rollouts, learning rate and loss.

    python benchmarks/trl_learning.py --seeds 0 1 2 [--trl-python PATH] [--steps 20] [--device cuda]

SmolLM2-135M-Instruct learns sums of two numbers (`examples/smollm2`, "arithmetic"): all weights, 8 tasks x 8 rollouts a
step. agl's side is that example's LangChain agent over HTTP, TRL's a reward function; each runs in a new process. Both
policies are measured by agl on the same held-out tasks. Reward per rollout is the curve of the held-out share over
equal rollouts; minutes are processor time of training, without measuring, and seconds the median step's. On cuda both
sides have float32 weights and compute in bfloat16.

`--keep DIR`: each run's facts, and runs that are there are not made again. `--trl-python` is the interpreter of an
environment that has TRL; without it, one is made on first use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the examples
TOKENS, GROUP, BATCH, RATE = 24, 8, 8, 2e-5


def trl(job: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL; this runs in its environment, which need not have agl."""
    import psutil
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["threads"])
    cuda = job["device"] == "cuda"
    rewards: list[float] = []
    began: list[float] = []
    ends: list[float] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            began.append(sum(psutil.Process().cpu_times()[:2]))
            ends.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                rewards.append(float(logs["reward"]))
                ends.append(time.perf_counter())
                print(f"step {len(rewards)}: reward {rewards[-1]:.3f}", flush=True)

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        numbers = [re.findall(r"-?\d+(?:\.\d+)?", said[0]["content"].replace(",", ""))[-1:] for said in completions]
        return [float(number == [right]) for number, right in zip(numbers, answer, strict=True)]

    system = [{"role": "system", "content": job["system"]}]
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(job["model"], attn_implementation="sdpa", dtype="float32"),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=job["directory"], use_cpu=not cuda, bf16=cuda, gradient_checkpointing=False, report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True, max_steps=job["steps"], learning_rate=RATE,
            lr_scheduler_type="constant", max_grad_norm=1.0, beta=0.0, epsilon=0.2, loss_type="dapo",
            scale_rewards="group", temperature=1.0, num_generations=GROUP, per_device_train_batch_size=BATCH * GROUP,
            max_completion_length=TOKENS, seed=job["seed"],
        ),
        train_dataset=Dataset.from_list(
            [
                {"prompt": [*system, {"role": "user", "content": task["question"]}], "answer": task["answer"]}
                for task in job["tasks"]
            ]
        ),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Watch()],
    )  # fmt: skip
    trainer.train()
    minutes = (sum(psutil.Process().cpu_times()[:2]) - began[0]) / 60
    policy = f"{job['directory']}/policy"
    trainer.save_model(policy)
    trainer.processing_class.save_pretrained(policy)
    return {"train": rewards, "minutes": minutes, "seconds": _median_step(ends), "policy": policy}


def agl_side(job: dict[str, Any]) -> dict[str, Any]:
    """Train with agl, as the example does."""
    import psutil

    import agl
    from agl.trainer.run.callbacks import Callback, Entry, RunView
    from examples.smollm2 import arithmetic
    from examples.smollm2.recipe import NOWHERE, TEMPLATE

    def used() -> float:
        me = psutil.Process()
        return sum(sum(p.cpu_times()[:2]) for p in (me, *me.children(recursive=True)))

    ends: list[float] = []
    after = began = used()

    class Watch(Callback):
        def on_start(self, run: RunView) -> None:
            ends.append(time.perf_counter())

        def on_step(self, run: RunView, entry: Entry) -> None:
            nonlocal after
            after = used()
            ends.append(time.perf_counter())

    grpo = agl.GRPO(
        model=job["gguf"], chat_template=TEMPLATE, steps=job["steps"], group_size=GROUP, batch_size=BATCH,
        learning_rate=RATE, max_context=256, max_response_tokens=TOKENS, threads=job["threads"], max_batch=64,
        device=job["device"], checkpoint_every=job["steps"],
    )  # fmt: skip
    run = agl.Trainer(grpo, n_workers=32, directory=job["directory"], seed=job["seed"], callbacks=[Watch()])
    result = run.fit(arithmetic.build(NOWHERE), job["tasks"])
    train = [entry["train/reward"] for entry in result.history if "train/reward" in entry]
    return {
        "train": train, "minutes": (after - began) / 60, "seconds": _median_step(ends), "policy": str(result.policy),
    }  # fmt: skip


def _median_step(ends: Sequence[float]) -> float:
    """Seconds of the median step, the first left out: it warms up."""
    return statistics.median(after - before for before, after in itertools.pairwise(ends[1:]))


def measure(policies: dict[str, str], seed: int, n: int, directory: Path) -> dict[str, Any]:
    """The share of held-out tasks that each policy solves, with its interval."""
    import agl
    from examples.smollm2 import arithmetic
    from examples.smollm2.recipe import NOWHERE

    heldout = arithmetic.questions("chain_sum", n, seed=1_000_000 + seed)
    report = agl.evaluate(
        arithmetic.build(NOWHERE), heldout, policies, max_response_tokens=TOKENS, n_workers=32, directory=directory
    )
    return {name: (p.success.value, p.success.low, p.success.high) for name, p in report.policies.items()}


def compare(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides with a seed, each in a process of its own, and their policies measured."""
    from agl.trainer.local.prepared import model_directory
    from agl.trainer.quickstart.smollm2 import smollm2
    from examples.smollm2 import arithmetic
    from examples.smollm2.recipe import TEMPLATE

    gguf = options.model or smollm2()
    job: dict[str, Any] = {
        "gguf": gguf, "model": str(model_directory(gguf, TEMPLATE)), "seed": seed, "steps": options.steps,
        "threads": options.threads, "device": options.device, "system": arithmetic.SYSTEM_PROMPT,
        "tasks": arithmetic.questions("chain_sum", 512, seed=seed),
    }  # fmt: skip
    facts: dict[str, Any] = {}
    for side, python in (("agl", sys.executable), ("trl", options.trl_python)):
        place = options.keep.resolve() / f"{side}-{seed}"
        kept = place / "facts.json"
        if not kept.exists():
            place.mkdir(parents=True, exist_ok=True)
            (place / "job.json").write_text(json.dumps(job | {"directory": str(place)}))
            subprocess.run(
                [python, __file__, "--job", side, str(place)], check=True,
                env={**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        facts[side] = json.loads(kept.read_text())
    measured = options.keep / f"measured-{seed}.json"
    if not measured.exists():
        policies = {side: facts[side]["policy"] for side in facts}
        found = measure({"start": job["model"]} | policies, seed, options.heldout, options.keep / f"evaluation-{seed}")
        measured.write_text(json.dumps(found))
    return facts | {"seed": seed, "measured": json.loads(measured.read_text())}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each seed."""
    lines = [
        "| seed | held out: start | agl | TRL | reward of all rollouts: agl / TRL | s/step: agl / TRL "
        "| CPU minutes: agl / TRL |",
        "|---|---|---|---|---|---|---|",
    ]
    for facts in results:
        shares = {
            name: f"{100 * value:.1f} % ({100 * low:.0f} to {100 * high:.0f})"
            for name, (value, low, high) in facts["measured"].items()
        }
        ours, theirs = facts["agl"], facts["trl"]
        mean = [sum(side["train"]) / len(side["train"]) for side in (ours, theirs)]
        lines.append(
            f"| {facts['seed']} | {shares['start']} | {shares['agl']} | {shares['trl']} "
            f"| {mean[0]:.3f} / {mean[1]:.3f} | {ours['seconds']:.1f} / {theirs['seconds']:.1f} "
            f"| {ours['minutes']:.1f} / {theirs['minutes']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agl" / "trl"
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--heldout", type=int, default=256, help="tasks that measure")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="another model than SmolLM2")
    parser.add_argument("--trl-python", type=Path, help="interpreter with TRL")
    parser.add_argument("--keep", type=Path, default=Path("runs/trl-learning"))
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        side, place = options.job
        facts = {"agl": agl_side, "trl": trl}[side](json.loads((Path(place) / "job.json").read_text()))
        (Path(place) / "facts.json").write_text(json.dumps(facts))
        return
    if options.trl_python is None:
        from trl_grpo import trl_python

        options.trl_python = trl_python(cache)
    print(table([compare(seed, options) for seed in options.seeds]))


if __name__ == "__main__":
    main()
