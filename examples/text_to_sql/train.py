"""Train the text-to-SQL program: python train.py --data SQL_EVAL_FOLDER --model MODEL_DIRECTORY (see the README)."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import databases
from agent import AGENTS, ROUNDS, chat_models, nodes, program
from rewards import Earnings, credit, rules

import agl
from agl import semconv
from agl.trainer.store import open_store


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a folder of sql-eval: questions_gen_sqlite.csv and PostgreSQL dumps")
    add("--out", type=Path, default=Path("text-to-sql-run"), help="the run's directory; databases are made in it")
    selected = parser.add_mutually_exclusive_group()
    selected.add_argument(
        "--select", default="writer,rewriter", help="agents to train, as one policy; others stay at the endpoint"
    )
    selected.add_argument("--joint", action="store_true", help="train all four, each as a separate policy")
    selected.add_argument("--shared", action="store_true", help="train all four as one policy")
    add("--model", help="the model to train: a Hugging Face directory or hub id")
    add("--dev", action="store_true", help="a dry run, no update: of --model, or without it of the endpoint alone")
    add("--endpoint", help="OpenAI-compatible base URL of the agents that are not trained; OpenAI's if left out")
    add("--api-key-env", default="OPENAI_API_KEY", help="the environment variable with the endpoint's key")
    add("--provider-model", default="gpt-4.1-mini", help="the endpoint's model")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=8, help="questions per step")
    add("--group-size", type=int, default=8, help="rollouts per question")
    add("--learning-rate", type=float, default=1e-6)
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank instead of all weights")
    add("--max-tokens", type=int, default=512, help="longest answer of any agent")
    add("--rounds", type=int, default=ROUNDS, help="how often the rewriter may try")
    add("--limit", type=int, help="use this many questions only")
    add("--val", type=int, default=32, help="questions held out for validation; 0 for none")
    add("--workers", type=int, default=8)
    add("--seed", type=int, default=0)
    add("--resume", action="store_true", help="resume after the last completed step in --out")
    add("--json", type=Path, help="write the facts of the run to this file")
    options = parser.parse_args(argv)
    if not options.model and not options.dev:
        parser.error("--model is needed to train; --dev --endpoint URL is a dry run without one")
    if unknown := set(options.select.split(",")) - set(AGENTS):
        parser.error(f"--select: no agent is called {', '.join(sorted(unknown))}; they are {', '.join(AGENTS)}")
    return options


def selection(options: argparse.Namespace) -> list[str] | dict[str, str]:
    """The value of `agl.Trainer(agents=)`."""
    if options.joint:
        return {name: name for name in AGENTS}
    return list(AGENTS) if options.shared or not options.model else options.select.split(",")


def build_agent(options: argparse.Namespace, questions: Sequence[dict[str, Any]], folder: Path) -> agl.Agent:
    """The program with its rewards.

    Args:
        questions: the result of `databases.tasks`. folder: of the SQLite files.
    """
    # Never another provider's key: the endpoint may be anybody's.
    key = os.environ.get(options.api_key_env) or f"{options.api_key_env} is not set"
    models = chat_models(options.provider_model, options.endpoint, key, options.max_tokens)
    earnings = Earnings(questions, folder)
    return agl.wrap(
        program(earnings.graded(nodes(models), selection(options)), rounds=options.rounds),
        reward=earnings.final_match,
        input=lambda task: {
            "id": task["id"],
            "question": task["question"],
            "schema": task["schema"],
            "database": str(folder / f"{task['db']}.sqlite"),
        },
        output=lambda state: {name: state[name] for name in ("query", "verdict", "answer")},
    )


def trainer(options: argparse.Namespace, algorithm: Any) -> agl.Trainer:
    """The trainer: which agents are trained, and how rewards are credited."""
    return agl.Trainer(
        algorithm,
        agents=selection(options),
        credit=credit,
        air=rules,
        n_workers=options.workers,
        directory=options.out,
        seed=options.seed,
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = arguments(argv)
    folder = options.out / "databases"
    if not options.resume:
        databases.make_databases(options.data, folder)
    questions = databases.tasks(options.data, folder)[: options.limit]
    held_out = (
        questions[:: max(len(questions) // options.val, 2)][: options.val] if options.val and not options.dev else []
    )
    train = [q for q in questions if q not in held_out]
    agent = build_agent(options, questions, folder)
    if not options.model:
        result = trainer(options, agl.Baseline()).dev(agent, train)
    else:
        algorithm = agl.GRPO(
            model=options.model,
            steps=options.steps,
            batch_size=options.batch_size,
            group_size=options.group_size,
            learning_rate=options.learning_rate,
            max_response_tokens=options.max_tokens,
            lora=agl.LoraSpec(rank=options.lora, alpha=2.0 * options.lora) if options.lora else None,
        )
        run = trainer(options, algorithm)
        result = run.dev(agent, train) if options.dev else run.fit(agent, train, held_out, resume=options.resume)
    facts = {
        "store": result.store,
        "policies": {name: str(path) for name, path in result.policies.items()},
        "history": result.history,
        "rewards": asyncio.run(mean_rewards(result)),
    }
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    for means in facts["rewards"]:
        values = ", ".join(f"{name} {value:.3f}" for name, value in means.items() if isinstance(value, float))
        print(f"{means['mode']} {means['step']}: {values}")
    if held_out and not options.dev:
        agl.Evaluation.of_result(result, success=ends_right).table()
    return facts


def ends_right(rollout: Any) -> bool:
    """Whether the program ended with the right rows, whatever its agents earned on the way."""
    return any(reward.name == "final_match" and reward.value >= 1 for reward in rollout.rewards)


async def mean_rewards(result: agl.Result) -> list[dict[str, Any]]:
    """Per step and mode, the mean of every reward by name, over all times that it was earned: `final_match` shows how
    good the program is, whereas the history's sum of all rewards also grows with the number of calls."""
    rewards: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    store = await open_store(result.store)
    try:
        for rollout in await store.query_rollouts(run_id=result.run_id, status=["succeeded"]):
            attempts = await store.query_attempts(rollout.rollout_id)
            for span in await store.query_spans(rollout.rollout_id, attempts[-1].attempt):
                if span.operation == semconv.REWARD:
                    name, value = span.attributes[semconv.REWARD_NAME], span.attributes[semconv.REWARD_VALUE]
                    step = (rollout.step or 0) + (rollout.mode == "train")
                    rewards[step, rollout.mode][str(name)].append(float(value))
    finally:
        await store.close()
    return [
        {"step": step, "mode": mode} | {name: sum(values) / len(values) for name, values in sorted(by_name.items())}
        for (step, mode), by_name in sorted(rewards.items())
    ]


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
