"""A clerk who is told what customers prefer, and asked later: reinforcement teaches it to look in its memory.

python -m examples.memory --tiny
python -m examples.memory --model Qwen/Qwen2.5-1.5B-Instruct
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import agl
from examples import common
from examples.memory.agent import NAME, build
from examples.memory.scripts import beginner, oracle
from examples.memory.tasks import NOTED, Shop, asked, fact, reward, said, shop

EXAMPLE = "memory"


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(EXAMPLE, __doc__, argv)
    facts = shop(options.seed, known=64, held_out=48, before=320) if options.short else shop(options.seed)
    run: dict[str, Any] = {"n_workers": 32, "seed": options.seed}
    limits: dict[str, Any] = {"max_response_tokens": 48, "threads": options.threads}
    [recall, _] = agl.memory.tools(k=1)

    def clerk(endpoint: common.Endpoint, memory: agl.Memory) -> agl.Agent:
        agent = build(endpoint.url, endpoint.model, endpoint.key, [recall])
        return agl.wrap(agent, reward=reward, memory=memory.per("agent"))

    with common.provider(options, oracle) as endpoint:
        if options.debug:
            return common.debug(clerk(endpoint, told(facts.known)), facts.train, options, memory=("on",))
        start = options.model or tiny(options, facts, clerk)
        memory = agl.Memory(keep=2000)
        agent = clerk(endpoint, memory)

        # 1. Customers tell what they prefer. There is nothing to learn in that, but it is remembered.
        listen = agl.GRPO(model=start, steps=1, batch_size=len(facts.statements), group_size=2, **limits)
        agl.Trainer(listen, directory=options.out / "told", **run).fit(agent, facts.statements)

        # 2. Questions about some of them: whoever looks the customer up earns more than whoever guesses.
        grpo = agl.GRPO(
            model=start,
            steps=options.steps or (10 if options.short else 24),
            batch_size=8,
            group_size=8,
            learning_rate=3e-4,
            minibatches=4,
            **limits,
        )
        result = agl.Trainer(grpo, directory=options.out / "grpo", **run).fit(agent, facts.train)

        # 3. Questions about the others: with the memory, without it, and with other customers' entries in its place.
        policies = {"before": start, "after": result.policy}
        report = agl.evaluate(agent, facts.test, policies, directory=options.out / "evaluation", **run)
    shares = {name: f"{100 * policy.success.value:.1f} %" for name, policy in report.policies.items()}
    summary = "{before} -> {after}; off {after, memory off}, shuffled {after, memory shuffled}".format_map(shares)
    return common.save(EXAMPLE, report, options, summary=summary)


def told(drinks: Mapping[str, str]) -> agl.Memory:
    """A memory as it is once these customers have told what they prefer."""
    memory = agl.Memory(keep=2000)
    memory.put_all([((NAME,), name, f"{fact(name, drink)}\n{NOTED}", None, 1.0) for name, drink in drinks.items()])
    return memory


def tiny(options: Namespace, facts: Shop, clerk: Callable[[common.Endpoint, agl.Memory], agl.Agent]) -> str:
    """A policy from scratch that imitates a beginner at another shop."""
    memory, pairs = told(facts.before), list(facts.before.items())
    lessons = [asked(*pair, wording) for pair in pairs for wording in (0, 1)] + [said(*pair) for pair in pairs[:64]]
    return common.tiny_policy(
        lambda endpoint: clerk(endpoint, memory),
        lessons,
        beginner,
        options.out / "policy",
        seed=options.seed,
        epochs=8 if options.short else 12,
    )


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
