"""`agl quickstart`: make a tiny policy, train a real LangChain agent with it, and show the proof on held-out tasks."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from agl.errors import ConfigError
from agl.trainer.evaluation.evaluation import Evaluation
from agl.trainer.quickstart.outcome import conclude
from agl.trainer.report import terminal
from agl.trainer.store.base import Store
from agl.trainer.store.location import read_store

GROUP_SIZE = 8
BATCH_SIZE = 16
HELDOUT_TASKS = 256
TRAIN_TASKS = 2048
STEPS = 16
THREADS = 1
"""Of the policy: on a shared machine two wait for each other, and the result depends on their number."""
SEED_FILE = "seed.txt"


def make(
    directory: Path, *, seed: int = 0, corpus: Path | None = None, hidden: int = 128, layers: int = 2, show: bool = True
) -> dict[str, Any]:
    """Make the tiny policy with a progress bar; returns its facts as JSON values.

    Args:
        corpus: text of another task; the policy has a tokenizer of it, and random weights.

    Raises:
        ConfigError: `corpus` is no text, or `hidden` no multiple of 64.
    """
    console = terminal.console(stderr=True)
    if hidden % 64:
        raise ConfigError(f"a width of {hidden}", hint=f"take a multiple of 64, such as {64 * (hidden // 64 + 1)}")
    own: dict[str, Any] = {} if corpus is None else {"corpus": _lines(corpus), "stages": ()}
    if show and corpus is None:
        console.print("warm start: a policy from scratch, on demonstrations; loading torch and transformers first")
    from agl.trainer.local.gguf_tokenizer import QWEN2
    from agl.trainer.quickstart.policy import make_policy

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not show) as bar:
        tasks: dict[str, Any] = {}

        def progress(stage: str, step: int, steps: int, loss: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"warm start: {stage} demonstrations", total=steps, loss=loss)
            bar.update(tasks[stage], completed=step, loss=loss)

        # Of the ways to cut a text that llama.cpp has, so that the policy can be exported: each digit is a token.
        report = make_policy(
            directory, seed=seed, threads=THREADS, progress=progress, hidden=hidden, layers=layers, words=QWEN2, **own
        )
    (Path(directory) / SEED_FILE).write_text(f"{seed}\n")
    if show:
        learned = "random weights" if own else f"{report.tokens:,} tokens of demonstrations"
        console.print(
            f"made a policy from scratch: {report.parameters:,} parameters, {report.vocabulary:,} tokens in its "
            f"vocabulary, {learned}, {report.seconds:.0f} s -> {report.directory}"
        )
    return asdict(report) | {"directory": str(report.directory), "loss": None if own else report.loss}


def _lines(corpus: Path) -> list[str]:
    try:
        lines = corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the corpus cannot be read: {error}", hint="name a file of UTF-8 text", path=corpus
        ) from error
    if not any(map(str.strip, lines)):
        raise ConfigError(
            "the corpus is empty",
            hint="write prompts and answers of your task into it, a few hundred lines",
            path=corpus,
        )
    return lines


def run(
    out: Path, *, seed: int = 0, steps: int = STEPS, n_workers: int = 32, resume: bool = False, progress: bool = True
) -> dict[str, Any]:
    """Run the quickstart in the directory `out` and print its result.

    Returns:
        As `conclude`; and rollout, the one that was explained.
    """
    console = terminal.console()
    started = time.monotonic()
    if progress:
        console.print(f"agl quickstart: {steps} steps of {BATCH_SIZE * GROUP_SIZE} rollouts; loading LangChain")
    from agl.adapters.langchain import wrap
    from agl.trainer.algorithms import GRPO
    from agl.trainer.quickstart.agent import build_agent
    from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer
    from agl.trainer.report.explain import explain
    from agl.trainer.run.trainer import Trainer

    start = out / "start-policy"
    seed_file = start / SEED_FILE
    if not seed_file.exists() or seed_file.read_text().strip() != str(seed):
        make(start, seed=seed, show=progress)
    elif progress:
        console.print(f"the policy to start from is {start} (made by: agl make-policy --seed {seed})")
    if not resume:
        # Only the policy that it starts from is kept.
        for name in ("checkpoints", "policy"):
            shutil.rmtree(out / name, ignore_errors=True)
        for file in (*out.glob("run.db*"), out / "curve.svg"):
            file.unlink(missing_ok=True)
    agent = wrap(build_agent(), reward=exact_answer)
    trainer = Trainer(
        GRPO(
            model=str(start),
            group_size=GROUP_SIZE,
            batch_size=BATCH_SIZE,
            steps=steps,
            learning_rate=3e-4,
            warmup_steps=min(2, steps - 1),
            schedule="linear",
            betas=(0.9, 0.95),
            minibatches=4,
            max_response_tokens=48,
            max_context=256,
            val_every=steps,
            max_batch=128,
            threads=THREADS,
        ),
        n_workers=n_workers,
        directory=out,
        seed=seed,
        progress=progress,
    )
    train = arithmetic_tasks(TRAIN_TASKS, seed=seed, split="train")
    heldout = arithmetic_tasks(HELDOUT_TASKS, seed=seed, split="heldout")
    result = trainer.fit(agent, train, heldout, resume=resume)
    seconds = time.monotonic() - started
    rollout = read_store(result.store, _one_rollout)
    console.print()
    explain(rollout, result.store)
    facts = conclude(
        out, Evaluation.of_result(result), result, result.history, steps=steps, seconds=seconds, ask="What is 27 * 36?"
    )
    return facts | {"rollout": rollout}


async def _one_rollout(store: Store) -> str:
    """A rollout of the last training step that has something to show: one that succeeded, if any."""
    rollouts = await store.query_rollouts(mode="train", status=["succeeded"])
    last = max(r.step or 0 for r in rollouts)
    of_step = [rollout.rollout_id for rollout in rollouts if rollout.step == last]
    for rollout_id in of_step:
        trained = await store.query_trained_calls(rollout_id)
        if len(trained) > 1 and any(t.advantage > 0 for t in trained):
            return rollout_id
    return of_step[0]
