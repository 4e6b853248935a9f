"""Two-hop questions, answered by searching: the second search needs what the first one found.

python -m examples.rag --tiny                            # everything here, on the CPU
python -m examples.rag --model DIR_OR_HUB_ID
python -m examples.rag --model DIR_OR_HUB_ID --questions musique.jsonl [--passages passages.jsonl]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import agl
from agl.errors import ConfigError
from agl.trainer.quickstart.tokenizer import NAMES
from examples import common
from examples.rag.agent import build
from examples.rag.retriever import write_index
from examples.rag.scripts import MORE_MISTAKES, beginner, oracle
from examples.rag.tasks import MARKS, generate, load, practice, reward

EXAMPLE = "rag"
LENGTHS: dict[str, Any] = {"max_response_tokens": 48, "max_context": 320}
SHORT_KINDS = ["country"]
SHORT_WORLD: dict[str, Any] = {"people": 480, "towns": 300, "kinds": SHORT_KINDS}
"""So many towns that the held-out questions have many answers: where few have, one that is miswritten decides. So many
people that "before" and "after" are told apart when "after" is as low as 50 %."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=Path, help="questions in MuSiQue's form, in place of generated ones")
    parser.add_argument("--passages", type=Path, help="what is searched for them; their own paragraphs if left out")
    parser.add_argument("--no-tool", action="store_true", help="the control: train the agent without its retriever")


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(EXAMPLE, __doc__, argv, add_options)
    if (options.tiny and options.questions) or (options.passages and not options.questions):
        raise ConfigError("no policy or no questions for these passages", hint="--model with --questions [--passages]")
    if options.questions:
        corpus = load(options.questions, options.passages)
    else:
        corpus = generate(options.seed, **(SHORT_WORLD if options.short else {}))
    letters = "" if options.questions else MARKS
    index = write_index(corpus.passages, options.out / "passages.sqlite", letters=letters)

    def agent(endpoint: common.Endpoint, *, tool: bool = True, index: Path = index) -> Any:
        return agl.wrap(build(endpoint.url, endpoint.model, endpoint.key, index, tool=tool), reward=reward)

    with common.provider(options, oracle) as endpoint:
        if options.debug:
            return common.debug(agent(endpoint), corpus.train, options)
        if options.tiny:
            start = beginners_policy(agent, options)
            steps, rate = (4, 5e-4) if options.short else (40, 3e-4)
            settings = {"learning_rate": rate, **LENGTHS}
        else:
            start = options.model
            steps, settings = 200, {"learning_rate": 1e-6, "max_response_tokens": 512, "max_context": 8192}

        grpo = agl.GRPO(
            model=start,
            steps=options.steps or steps,
            batch_size=8,
            minibatches=4,
            schedule="linear",
            threads=options.threads,
            **settings,
        )
        trained = agent(endpoint, tool=not options.no_tool)
        result = agl.Trainer(grpo, n_workers=32, directory=options.out / "grpo", seed=options.seed).fit(
            trained, corpus.train
        )

        policies = {"before": start, "after": result.policy}
        report = agl.evaluate(trained, corpus.held_out, policies, n_workers=32, directory=options.out / "evaluation")
        without = agl.evaluate(
            agent(endpoint, tool=False),
            corpus.held_out,
            {"after, no tool": result.policy},
            n_workers=32,
            directory=options.out / "no-tool",
        )
    columns = {
        name: {part: f"{policy.rewards[part].value:.3f}" for part in ("f1", "recall@3")}
        for report in (report, without)
        for name, policy in report.policies.items()
    }
    return common.save(EXAMPLE, (report, without), options, columns=columns)


def beginners_policy(agent: Callable[..., Any], options: argparse.Namespace) -> str:
    """A policy from scratch that imitates the beginner in another world, in which no held-out name occurs."""
    world = practice(options.seed, kinds=SHORT_KINDS) if options.short else practice(options.seed)
    index = write_index(world.passages, options.out / "practice.sqlite", letters=MARKS)
    short: dict[str, Any] = {"epochs": 8, "batch_size": 4, "learning_rate": 1.5e-3, "induction": True, "words": NAMES}
    return common.tiny_policy(
        partial(agent, index=index),
        world.train[: 200 if options.short else None],
        partial(beginner, mistakes=MORE_MISTAKES) if options.short else beginner,
        options.out / "tiny",
        seed=options.seed,
        **(short if options.short else {"epochs": 3, "batch_size": 8}),
        **LENGTHS,
    )


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
