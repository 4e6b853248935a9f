"""The algorithm: enqueues questions, waits for the runners, and reads accuracy and tokens from the spans."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from typing import Any

import agl
from agl.compat import find_final_reward
from agl.errors import RolloutError
from agl.trainer.report.statistics import success_interval

WAIT_SECONDS = 600.0


def questions(n: int, seed: int) -> list[dict[str, str]]:
    """Sums, differences and products of two numbers."""
    rng = random.Random(seed)
    tasks = []
    for _ in range(n):
        a, b, op = rng.randrange(10, 100), rng.randrange(10, 100), rng.choice("+-*")
        answer = {"+": a + b, "-": a - b, "*": a * b}[op]
        tasks.append({"question": f"What is {a} {op} {b}?", "answer": str(answer)})
    return tasks


def tokens_of(spans: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, sampled ids) of each call of the model, in order; both empty where the ids are unknown."""
    calls = [s for s in spans if s.attributes.get("gen_ai.operation.name") == "chat"]
    return [(s.attributes.get("prompt_token_ids", []), s.attributes.get("response_token_ids", [])) for s in calls]


def is_tito(calls: list[tuple[list[int], list[int]]]) -> bool:
    """Token in, token out: every call's ids are known, and each prompt continues the tokens sampled before it, not a
    text that was tokenised again."""
    known = bool(calls) and all(prompt and sampled for prompt, sampled in calls)
    turns = itertools.pairwise(calls)
    return known and all(later[: len(prompt + ids)] == prompt + ids for (prompt, ids), (later, _) in turns)


@agl.algorithm
async def my_algorithm(store: agl.LightningStore, train_dataset: Any) -> dict[str, float]:
    """Accuracy and the share of rollouts whose exact tokens are known."""
    rollouts = [await store.enqueue_rollout(task, mode="val") for task in train_dataset]
    ids = [rollout.rollout_id for rollout in rollouts]
    print(f"enqueued {len(ids)} rollouts", flush=True)
    done = await store.wait_for_rollouts(rollout_ids=ids, timeout=WAIT_SECONDS)
    if len(done) < len(ids):
        raise RolloutError(
            f"{len(ids) - len(done)} rollouts did not end in {WAIT_SECONDS:g} s",
            hint="start a runner: agl runner --store URL --agent agent.py:my_rollout",
        )
    rewards, exact, calls = [], [], 0
    for rollout in done:
        spans = await store.query_spans(rollout.rollout_id, "latest")
        rewards.append(find_final_reward(spans) or 0.0)
        tokens = tokens_of(spans)
        exact.append(is_tito(tokens))
        calls += len(tokens)
    failed = sum(rollout.status != "succeeded" for rollout in done)
    result = {"accuracy": sum(rewards) / len(rewards), "tito_rate": sum(exact) / len(exact)}
    print(f"rollouts   {len(done)}, {failed} failed, {calls} calls of the model")
    low, high = success_interval(rewards)
    print(f"accuracy   {result['accuracy']:.1%} [{low:.1%}, {high:.1%}]")
    print(f"TITO rate  {result['tito_rate']:.1%}")
    return result


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="http://127.0.0.1:8000", help="agl serve, or agl store")
    parser.add_argument("--llm", help="with agl store: the endpoint that answers, for example http://127.0.0.1:8001/v1")
    parser.add_argument("--model", default="policy", help="its model's name")
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    store = agl.LightningStoreClient(options.store)
    try:
        if options.llm:
            await store.add_resources({"llm": agl.LLM(options.llm, options.model)})
        my_algorithm.set_store(store)
        await my_algorithm.run(train_dataset=questions(options.tasks, options.seed))
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
