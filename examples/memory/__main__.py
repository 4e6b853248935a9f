"""A clerk who is told what customers prefer, and asked later: reinforcement teaches it to look in its memory.

python -m examples.memory --tiny
python -m examples.memory --model Qwen/Qwen2.5-1.5B-Instruct
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import agl
from examples import common
from examples.memory.agent import build
from examples.memory.scripts import beginner, oracle
from examples.memory.tasks import NOTED, Shop, fact, reward, shops

EXAMPLE = "memory"


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(EXAMPLE, __doc__, argv)
    facts = shops(options.seed, train=56, beginner=320) if options.short else shops(options.seed)
    run: dict[str, Any] = {"n_workers": 32, "seed": options.seed}
    limits: dict[str, Any] = {"max_response_tokens": 48, "threads": options.threads}
    [recall, _] = agl.memory.tools(k=1)

    def clerk(endpoint: common.Endpoint, memory: agl.Memory) -> agl.Agent:
        agent = build(endpoint.url, endpoint.model, endpoint.key, [recall])
        return agl.wrap(agent, reward=reward, memory=memory.per("shop"))

    with common.provider(options, oracle) as endpoint:
        if options.debug:
            agent = clerk(endpoint, told(facts.train))
            return common.debug(agent, facts.train.questions(), options, memory=("on",))
        start = options.model or tiny(options, facts.beginner, clerk)
        agent = clerk(endpoint, agl.Memory(keep=2000))

        # 1. The customers of two shops tell what they prefer. Nothing is learned from that, but it is remembered.
        statements = facts.train.statements + facts.held_out.statements
        listen = agl.REINFORCEPlusPlus(model=start, steps=1, batch_size=len(statements), **limits)
        agl.Trainer(listen, directory=options.out / "told", **run).fit(agent, statements)

        # 2. Questions in one shop: whoever looks the customer up earns more than whoever guesses.
        grpo = agl.GRPO(
            model=start,
            steps=options.steps or (7 if options.short else 24),
            batch_size=8,
            group_size=8,
            learning_rate=3e-4,
            minibatches=4,
            **limits,
        )
        result = agl.Trainer(grpo, directory=options.out / "grpo", **run).fit(agent, facts.train.questions())

        # 3. Questions in the other: with its memory, without it, and with its other customers' entries instead.
        policies = {"after": result.policy} if options.short else {"before": start, "after": result.policy}
        report = agl.evaluate(agent, facts.held_out.questions(), policies, directory=options.out / "evaluation", **run)
    shares = {"before": ""}
    shares |= {name: f"{100 * policy.success.value:.1f} %" for name, policy in report.policies.items()}
    summary = "{before} -> {after}; off {after, memory off}, shuffled {after, memory shuffled}".format_map(shares)
    return common.save(EXAMPLE, report, options, summary=summary)


def told(shop: Shop) -> agl.Memory:
    """A memory as it is once a shop's customers have told what they prefer."""
    memory = agl.Memory(keep=2000)
    texts = {name: f"{fact(name, drink)}\n{NOTED}" for name, drink in shop.drinks.items()}
    memory.put_all([((shop.name,), name, text, None, 1.0) for name, text in texts.items()])
    return memory


def tiny(options: Namespace, shop: Shop, clerk: Callable[[common.Endpoint, agl.Memory], agl.Agent]) -> str:
    """A policy from scratch that imitates a beginner at another shop."""
    memory = told(shop)
    return common.tiny_policy(
        lambda endpoint: clerk(endpoint, memory),
        shop.questions(0) + ([] if options.short else shop.questions(1)) + shop.statements[:64],
        beginner,
        options.out / "policy",
        seed=options.seed,
        epochs=7 if options.short else 12,
        learning_rate=3e-3 if options.short else 2e-3,
    )


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
