"""A clerk who is told what customers prefer, and asked later: reinforcement teaches it to look in its memory.

    python -m examples.memory --tiny
    python -m examples.memory --model Qwen/Qwen2.5-1.5B-Instruct
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import agl
from examples import common
from examples.memory.agent import build
from examples.memory.scripts import beginner, oracle
from examples.memory.tasks import reward, shop

EXAMPLE = "memory"


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(EXAMPLE, __doc__, argv)
    facts = shop(options.seed, held_out=64 if options.short else 128)
    run: dict[str, Any] = {"n_workers": 32, "seed": options.seed}
    [recall, _] = agl.memory.tools(k=1)

    def clerk(endpoint: common.Endpoint, memory: agl.Memory) -> agl.Agent:
        agent = build(endpoint.url, endpoint.model, endpoint.key, [recall])
        return agl.wrap(agent, reward=reward, memory=memory.per("agent"))

    with common.provider(options, oracle) as endpoint:
        start = options.model or tiny(options, facts, clerk)
        memory = agl.Memory(keep=2000)
        agent = clerk(endpoint, memory)

        # 1. Customers tell what they prefer. There is nothing to learn in that, but it is remembered.
        listen = agl.GRPO(model=start, steps=1, batch_size=len(facts.statements), group_size=2, max_response_tokens=48)
        agl.Trainer(listen, directory=options.out / "told", **run).fit(agent, facts.statements)
        if options.debug:
            return common.debug(agent, facts.train, options)

        # 2. Questions about some of them: whoever looks the customer up earns more than whoever guesses.
        grpo = agl.GRPO(
            model=start,
            steps=options.steps or (6 if options.short else 24),
            batch_size=8,
            group_size=8,
            learning_rate=3e-4,
            minibatches=4,
            max_response_tokens=48,
        )
        result = agl.Trainer(grpo, directory=options.out / "grpo", **run).fit(agent, facts.train)

        # 3. Questions about the others; with the memory, without it, and with entries of other customers in their place.
        report = agl.evaluate(
            agent, facts.test, {"before": start, "after": result.policy}, directory=options.out / "evaluation", **run
        )
    return common.save(EXAMPLE, report, options)


def tiny(options: Any, facts: Any, clerk: Any) -> str:
    """A policy from scratch that imitates a beginner, who has a memory of its own: that of another shop."""
    school = agl.Memory(keep=2000)
    ...


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
