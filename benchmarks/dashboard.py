"""The dashboard with a large run, and what it costs a training.

    python benchmarks/dashboard.py paint      # first paint: 1,000 steps, 100,000 rollouts, SQLite, Chromium
    python benchmarks/dashboard.py training   # step time with the page open and without, in turns
    python benchmarks/dashboard.py paint --steps 100

The run of `paint` is synthetic; its rows are written through the store. A page has painted when its curve or its
table is drawn: milliseconds since the navigation began, median of several new browser contexts. `training` trains the
quickstart's tiny policy as `agl train --dashboard` does, page and server on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import agl
from agl import semconv
from agl.mdp.spans import Span
from agl.mdp.types import Call, float_array, int_array
from agl.trainer.dashboard.server import link, serving_beside
from agl.trainer.dashboard.sources import Source
from agl.trainer.http.auth import Keys
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout, TrainedCall, TrainingRun

RUN = "run-synthetic"
GROUP, TOKENS, METRICS = 10, 60, 40
VISITS = 7


async def write_run(url: str, steps: int, rollouts: int) -> None:
    """A run of so many steps of `rollouts` rollouts each, one call per rollout, and `METRICS` numbers per step."""
    store = await open_store(url)
    chance = random.Random(0)
    run = TrainingRun(RUN, algorithm="GRPO", steps=steps, created_at=time.time())
    await store.put_run(run)
    try:
        for step in range(steps):
            await _write_step(store, step, rollouts, chance)
            reward = 1 - math.exp(-3 * step / steps) + chance.gauss(0, 0.02)
            values = {f"learner/number_{n}": chance.random() for n in range(METRICS - 1)}
            more = {"val/reward": reward - 0.05} if step % 20 == 19 else {}
            await store.add_metrics(RUN, step + 1, {"train/reward": reward, **values, **more})
            if step % 50 == 49:
                print(f"  {step + 1} of {steps} steps written", file=sys.stderr)
        await store.put_run(TrainingRun(RUN, algorithm="GRPO", step=steps, steps=steps, status="succeeded"))
    finally:
        await store.close()


async def _write_step(store: Store, step: int, rollouts: int, chance: random.Random) -> None:
    new = [
        NewRollout({"question": f"{step} {i}"}, run_id=RUN, step=step, group=f"train-{step}-{i // GROUP}", index=i)
        for i in range(rollouts)
    ]
    ids = [r.rollout_id for r in await store.enqueue_rollouts(new)]
    await asyncio.gather(*(store.dequeue_rollout("worker", run_id=RUN) for _ in ids))
    spans, calls, trained = [], [], []
    for id in ids:
        reward = float(chance.random() < 0.5)
        facts = {semconv.OPERATION_NAME: semconv.REWARD, semconv.REWARD_NAME: "reward"}
        facts |= {semconv.REWARD_VALUE: reward, semconv.REWARD_SOURCE: "return", semconv.REWARD_PRIMARY: True}
        spans.append(
            Span(f"{chance.getrandbits(128):032x}", "1" * 16, None, id, 1, "reward", 1.0, 2.0, attributes=facts)
        )
        tokens = int_array([chance.randrange(500) for _ in range(TOKENS)])
        calls.append(
            Call(id=f"call-{id}", rollout_id=id, attempt=1, index=0, agent="solver", policy="policy",
                 policy_version=step, prompt_ids=tokens, response_ids=tokens, logprobs=float_array([-0.5] * TOKENS),
                 request={"messages": [{"role": "user", "content": "question"}]},
                 response={"role": "assistant", "content": "answer"})
        )  # fmt: skip
        trained.append(TrainedCall(f"call-{id}", id, step + 1, step + 1, 0, reward, reward, reward - 0.5, TOKENS))
    await store.add_spans(spans)
    await store.add_calls(calls)
    await store.add_trained_calls(RUN, trained)
    await asyncio.gather(*(store.update_attempt(id, 1, "succeeded") for id in ids))


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A Chromium."""
    with sync_playwright() as playwright:
        path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


def paint(database: Path | None, steps: int, rollouts: int) -> None:
    with contextlib.ExitStack() as stack:
        if database is None:
            database = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run.db"
        url = f"sqlite:///{database}"
        if not database.exists():
            started = time.perf_counter()
            asyncio.run(write_run(url, steps, rollouts))
            print(f"written in {time.perf_counter() - started:.0f} s, {database.stat().st_size / 2**20:.0f} MiB")
        keys = Keys.mint()
        address = stack.enter_context(serving_beside([Source("synthetic", url)], keys))
        chromium = stack.enter_context(browser())
        pages = {
            "runs": ("/", "table.runs"),
            "run": (f"/0/run/{RUN}", ".pick canvas"),
            "step": (f"/0/run/{RUN}/train/{steps}", ".strip"),
        }
        for name, (route, shown) in pages.items():
            times = [first_paint(chromium, link(address, keys.minted) + route, shown) for _ in range(VISITS)]
            print(f"{name:5} {statistics.median(times):6.0f} ms  (of {', '.join(f'{t:.0f}' for t in times)})")


def first_paint(chromium: Any, url: str, shown: str) -> float:
    """Milliseconds from the beginning of the navigation to the frame in which the element is there."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.add_init_script(
        """(() => {
          const look = () => document.querySelector(SHOWN)
            ? requestAnimationFrame(() => { globalThis.painted = performance.now(); })
            : requestAnimationFrame(look);
          look();
        })()""".replace("SHOWN", repr(shown))
    )
    page.goto(url)
    painted = None
    while painted is None:
        page.wait_for_timeout(20)
        painted = page.evaluate("globalThis.painted ?? null")
    context.close()
    return painted


def training(policy: Path | None, steps: int, turns: int) -> None:
    with tempfile.TemporaryDirectory() as base, browser() as chromium:
        if policy is None:
            from agl.trainer.quickstart.policy import make_policy

            policy = Path(base) / "policy"
            make_policy(policy, seed=0, threads=1)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(turns):
            # In both orders, since the machine's speed drifts.
            for opened in (False, True) if turn % 2 == 0 else (True, False):
                directory = Path(base) / f"{turn}-{opened}"
                taken = _train(policy, directory, steps, chromium if opened else None)
                seconds[opened] += taken
                print(f"turn {turn}, page {'open' if opened else 'shut'}: {statistics.median(taken):.3f} s a step")
        shut, opened_ = (statistics.median(seconds[o]) for o in (False, True))
        print(f"median step: {shut:.3f} s without, {opened_:.3f} s with the page open; ratio {opened_ / shut:.3f}")


def _train(policy: Path, directory: Path, steps: int, chromium: Any) -> Sequence[float]:
    """The seconds of each step but the first."""
    from agl.trainer.quickstart.agent import build_agent

    trainer = agl.Trainer(
        agl.GRPO(model=str(policy), group_size=8, batch_size=8, steps=steps, learning_rate=1e-6, max_response_tokens=48,
                 max_context=256, val_before_train=False, max_batch=64),
        n_workers=16, directory=directory, progress=False,
    )  # fmt: skip
    agent = agl.wrap(build_agent(), reward=exact_answer)
    keys = Keys.mint()
    with contextlib.ExitStack() as stack:
        if chromium is not None:
            sources = [Source("run", f"sqlite:///{directory / 'run.db'}")]
            url = stack.enter_context(serving_beside(sources, keys))
            directory.mkdir()
            (directory / "run-id").write_text("run-open")
            page = chromium.new_page()
            stack.callback(page.close)
            page.goto(link(url, keys.minted) + "/0/run/run-open")
        # Resumed, a run keeps the id that its directory has, which the page was opened with.
        result = trainer.fit(agent, arithmetic_tasks(256, seed=0, split="train"), resume=chromium is not None)
        if chromium is not None and page.locator(".pick canvas").count() == 0:
            raise SystemExit("the page did not show the run")
    return [h["seconds"] for h in result.history if "seconds" in h][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("paint", "training"))
    parser.add_argument("--steps", type=int, help="1,000 for paint, 12 for training")
    parser.add_argument("--rollouts", type=int, default=100, help="per step of paint")
    parser.add_argument("--database", type=Path, help="keep paint's store here, or take the one that is there")
    parser.add_argument("--policy", type=Path, help="what `agl make-policy` has made")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    if options.what == "training" and options.steps == 1:
        parser.error("--steps: more than 1, for the first does not count")
    if options.what == "paint":
        paint(options.database, options.steps or 1000, options.rollouts)
    else:
        training(options.policy, options.steps or 12, options.turns)


if __name__ == "__main__":
    main()
