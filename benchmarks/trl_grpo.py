"""GRPO by agl against GRPO by TRL: seconds a step, processor time a step and reward per minute.

    python benchmarks/trl_grpo.py [--trl-python PATH] [--cases single long] [--rounds 2] [--steps 6]
    python benchmarks/trl_grpo.py --model DIR --threads 2 --rollouts 64    # a real model in place of the tiny one
    python benchmarks/trl_grpo.py --model DIR --device cuda --cores 8 --threads 4

The same policy from scratch, tasks, rewards, groups, sampling and optimiser, each side on the same cores: float32
weights, on cuda computing in bfloat16. TRL samples in its own process with `generate`; agl's side is an agent that
calls the OpenAI SDK over HTTP, with its spans, calls and rewards in SQLite. The sides take turns; each turn is a new
process, whose first steps do not count. "single" is a short question and answer, "long" puts a system prompt of 2,000
tokens before it.

`--trl-python` is the interpreter of an environment that has TRL; without it, one is made on first use.
This file cannot be called trl.py: verl, which `verl_bridge.py` runs from this folder, would take it for TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

TOKENS = 48
"""The longest answer."""
WARM = 2
"""Steps at the start of a turn that do not count."""
LONG = 2000
"""Tokens of the long system prompt."""


@dataclass(frozen=True, slots=True)
class Case:
    """A job: tasks a step, rollouts a task, and whether the long system prompt is there."""

    batch: int
    group: int
    long: bool


CASES = {"single": Case(16, 8, long=False), "long": Case(4, 8, long=True)}


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds and processor seconds (children included) of a step, its mean reward and its sampled tokens."""

    seconds: float
    cpu: float
    reward: float
    tokens: float


def reward_of(text: str) -> float:
    """Digits, up to the longest answer: the policy of a minute can learn it, and answers stay long."""
    return min(1.0, sum(c.isdigit() for c in text) / TOKENS)


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}?"


def messages(i: int, system: str) -> list[dict[str, str]]:
    """The prompt of task `i`."""
    return [{"role": "system", "content": system}, {"role": "user", "content": question(i % 89, i % 53)}]


def cpu_seconds() -> float:
    """Processor time of this process and its children, those that still run included."""
    import psutil

    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (me, *me.children(recursive=True)))


class Clock:
    """Makes a `Step` of what happened since the last call."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._last = (time.perf_counter(), cpu_seconds())

    def step(self, reward: float, tokens: float) -> None:
        now = (time.perf_counter(), cpu_seconds())
        self.steps.append(Step(now[0] - self._last[0], now[1] - self._last[1], reward, tokens))
        self._last = now


# -- the two sides, each in a process of its own ----------------------------------------------------------------------


def trl(
    case: Case, model: str, steps: int, threads: int, system: str, directory: str, rate: float, device: str
) -> list[Step]:
    """Steps of TRL's trainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    clock: Clock | None = None

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            nonlocal clock
            clock = Clock()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if clock is not None and logs and "reward" in logs:
                clock.step(float(logs["reward"]), float(logs["completions/mean_length"]) * case.batch * case.group)

    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [reward_of(answer[0]["content"]) for answer in completions]

    trainer = GRPOTrainer(
        # sdpa is faster than eager here, gradient checkpointing (TRL's default) slower than none.
        AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa", dtype="float32"),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=directory, use_cpu=device == "cpu", bf16=device == "cuda", gradient_checkpointing=False,
            report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True, max_steps=steps, learning_rate=rate,
            lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, beta=0.0,
            epsilon=0.2, loss_type="dapo", scale_rewards="group", temperature=1.0, num_generations=case.group,
            per_device_train_batch_size=case.batch * case.group, max_completion_length=TOKENS, seed=0,
        ),
        train_dataset=Dataset.from_list([{"prompt": messages(i, system)} for i in range(512)]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Watch()],
    )  # fmt: skip
    trainer.train()
    assert clock is not None
    return clock.steps


_client: Any = None


async def agent(task: dict[str, Any]) -> float:
    """One call through the SDK that people use, whose client is made once."""
    global _client
    if _client is None:
        from openai import AsyncOpenAI

        _client = AsyncOpenAI(api_key="not used in training")
    answer = await _client.chat.completions.create(model="any", messages=task["messages"], max_completion_tokens=TOKENS)
    return reward_of(answer.choices[0].message.content or "")


def agl(
    case: Case, model: str, steps: int, threads: int, system: str, directory: str, rate: float, device: str
) -> list[Step]:
    """Steps of agl's trainer."""
    import agl
    from agl.trainer.run.callbacks import Callback, Entry, RunView

    clock: Clock | None = None

    class Watch(Callback):
        def on_step(self, run: RunView, entry: Entry) -> None:
            assert clock is not None
            clock.step(float(entry["train/reward"]), float(entry.get("learner/tokens", 0)))

    algorithm = agl.GRPO(
        model=model, group_size=case.group, batch_size=case.batch, steps=steps, learning_rate=rate, betas=(0.9, 0.95),
        max_response_tokens=TOKENS, device=device, threads=threads, max_batch=case.batch * case.group,
        checkpoint_every=steps, val_before_train=False,
    )  # fmt: skip
    trainer = agl.Trainer(
        algorithm, n_workers=case.batch * case.group, directory=directory, progress=False, callbacks=[Watch()]
    )
    clock = Clock()
    trainer.fit(agl.rollout(agent), [{"messages": messages(i, system)} for i in range(512)])
    return clock.steps


# -- turns ------------------------------------------------------------------------------------------------------------


def make_policy(directory: Path, case: Case) -> tuple[Path, str]:
    """A policy of the quickstart's shape that answers in words and digits, and the system prompt of the case."""
    from agl.trainer.quickstart import demos
    from agl.trainer.quickstart.policy import Recipe, Stage, make_policy
    from agl.trainer.quickstart.tokenizer import build_tokenizer

    def demonstrations(system: str, steps: int) -> list[Stage]:
        def draw(rng: random.Random) -> demos.Demo:
            prompt = demos.opening(question(rng.randrange(89), rng.randrange(53)), system, ())
            answer = " ".join(rng.choices(["I", "think", "it", "is", "1", "3", "7"], k=rng.randrange(10, 30)))
            return (demos.Turn(prompt, f"{answer}<|im_end|>"),)

        return [Stage("answers", draw, steps)]

    system, policy = "Answer.", directory / "short"
    if not (policy / "config.json").exists():
        make_policy(policy, threads=1, induction=False, stages=demonstrations(system, 60))
    if case.long:
        tokenizer, rule, system = build_tokenizer(), 0, ""
        while len(tokenizer.encode(system)) < LONG:
            rule += 1
            system += f"Rule {rule}. Answer question {rule} with the number {rule * 37 % 1000} and nothing else.\n"
        short, policy = policy, directory / "long"
        recipe = Recipe(rows=2, row_tokens=LONG + 200)
        if not (policy / "config.json").exists():
            make_policy(policy, threads=1, recipe=recipe, stages=demonstrations(system, 30), start=short)
    file = policy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 2 * LONG}))
    return policy, system


def real_policy(model: str, case: Case) -> tuple[Path, str]:
    """A model that was there before, and the system prompt of the case; the long one has half as many tokens."""
    from agl.trainer.local.prepared import model_directory
    from agl.trainer.local.tokenizer import load_tokenizer

    directory = model_directory(model)
    tokenizer, system, rule = load_tokenizer(directory), "Answer.", 0
    while case.long and len(tokenizer.encode(system)) < LONG // 2:
        rule += 1
        system += f"\nRule {rule}. Answer question {rule} with the number {rule * 37 % 1000} and nothing else."
    return Path(directory), system


def trl_python(venv: Path) -> Path:
    """The interpreter of an environment with the newest TRL and this environment's torch; made if missing."""
    python = venv / "bin" / "python"
    if not list(venv.glob("lib/*/site-packages/trl")):
        print(f"building {venv} with TRL, once ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        torch = f"torch=={version('torch').partition('+')[0]}"
        for package in (torch, "trl"):
            subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    return python


def turn(side: str, python: Path, name: str, options: argparse.Namespace, model: Path, system: str) -> list[Step]:
    """Run one side in a new process on the chosen cores."""
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "side": side, "case": asdict(CASES[name]), "model": str(model), "steps": WARM + options.steps,
            "threads": options.threads, "system": system, "directory": scratch,
            "device": options.device, "rate": 5e-4 if options.model is None else 1e-5,
        }  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        out = Path(scratch) / "steps.json"
        with (Path(scratch) / "log").open("w+") as log:
            command = ["taskset", "-c", ",".join(map(str, cores)), python, "-P", __file__, "--job", json.dumps(job)]
            done = subprocess.run([*command, "--json", out], env=environment, stdout=log, stderr=log)
            if done.returncode:
                log.seek(0)
                raise SystemExit(f"{side} failed:\n{log.read()[-4000:]}")
        return [Step(**step) for step in json.loads(out.read_text())][WARM:]


def compare(name: str, steps: dict[str, list[Step]]) -> dict[str, Any]:
    """The figures of both sides, and their ratios."""
    facts: dict[str, Any] = {"case": name}
    rollouts = CASES[name].batch * CASES[name].group
    for side, done in steps.items():
        seconds = statistics.median(s.seconds for s in done)
        reward = statistics.mean(s.reward for s in done)
        facts[side] = {
            "seconds": seconds,
            "cpu": statistics.median(s.cpu for s in done),
            "reward": reward,
            "last_reward": done[-1].reward,
            "tokens": statistics.mean(s.tokens for s in done),
            "reward_per_minute": 60 * reward * rollouts / seconds,
        }
    facts["speedup"] = facts["trl"]["seconds"] / facts["agl"]["seconds"]
    facts["cpu_ratio"] = facts["trl"]["cpu"] / facts["agl"]["cpu"]
    return facts


def table(results: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = [
        "| | s/step: agl / TRL | TRL / agl | CPU s/step: agl / TRL | TRL / agl | tokens sampled a step | reward/min |",
        "|---|---|---|---|---|---|---|",
    ]
    for facts in results:
        case, ours, theirs = CASES[facts["case"]], facts["agl"], facts["trl"]
        lines.append(
            f"| {facts['case']}: {case.batch} x {case.group} rollouts "
            f"| {ours['seconds']:.2f} / {theirs['seconds']:.2f} "
            f"| {facts['speedup']:.2f}x | {ours['cpu']:.2f} / {theirs['cpu']:.2f} | {facts['cpu_ratio']:.2f}x "
            f"| {ours['tokens']:.0f} / {theirs['tokens']:.0f} "
            f"| {ours['reward_per_minute']:.0f} / {theirs['reward_per_minute']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agl" / "trl"
    parser.add_argument("--trl-python", type=Path, help="interpreter with TRL")
    parser.add_argument("--rival-venv", type=Path, default=cache, help="without it: TRL's environment (%(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=6, help="steps that count, each turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2, help="cores of either side")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of either side")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="directory or GGUF file to train in place of a tiny policy")
    parser.add_argument("--rollouts", type=int, help="of a step, instead of 128 and 32")
    parser.add_argument("--policies", type=Path, help="keep the policies here, and take those that are there")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        run = {"agl": agl, "trl": trl}[job.pop("side")]
        done = run(Case(**job.pop("case")), **job)
        options.json.write_text(json.dumps([asdict(step) for step in done]))
        return
    if options.rollouts:
        for name, case in CASES.items():
            CASES[name] = replace(case, batch=max(1, options.rollouts // case.group))
    with tempfile.TemporaryDirectory() as scratch:
        pythons = {"agl": Path(sys.executable), "trl": options.trl_python or trl_python(options.rival_venv)}
        results = []
        for name in options.cases:
            if options.model is None:
                model, system = make_policy(options.policies or Path(scratch), CASES[name])
            else:
                model, system = real_policy(options.model, CASES[name])
            steps: dict[str, list[Step]] = {side: [] for side in pythons}
            for i in range(options.rounds):
                for side, python in pythons.items():
                    done = turn(side, python, name, options, model, system)
                    steps[side] += done
                    print(f"{name} {i + 1} {side}: " + " ".join(f"{s.seconds:.2f}" for s in done), file=sys.stderr)
            results.append(compare(name, steps))
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
