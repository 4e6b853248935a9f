"""Two agents answer and vote; the one behind `agent_a` is trained to agree with the other, which stays as it is.

    python -m examples.massgen --tiny
    python -m examples.massgen --model DIR --endpoint https://api.../v1 --endpoint-model NAME   # of agent_b

`agent_b`'s key is in OPENAI_API_KEY. With `--tiny` it is `scripts.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import agl
from agl.massgen import RLAgentMixin, RLConfig, RLOrchestratorMixin
from agl.rewards import Consensus
from examples import common
from examples.massgen.agent import Agent, Orchestrator, client
from examples.massgen.scripts import beginner, oracle
from examples.massgen.tasks import make_tasks

EXAMPLE = "massgen"
LENGTHS: dict[str, Any] = {"max_response_tokens": 48, "max_context": 256}
AGREED = Consensus(answers="votes", quorum=1.0)
"""1 if both have voted, for the same answer, else 0."""
# The mixins name agents and record what happens; the reward is the vote alone.
RL = RLConfig(enable_rl=True, enable_tool_rewards=False, enable_answer_quality_rewards=False,
              enable_coordination_rewards=False)  # fmt: skip


class RLAgent(RLAgentMixin, Agent):
    pass


class RLOrchestrator(RLOrchestratorMixin, Orchestrator):
    pass


def build(endpoint: common.Endpoint, present: bool = False) -> agl.Agent:
    """The discussion, on a provider's server."""
    connection = client(endpoint.url, endpoint.key)

    async def discussion(task: dict[str, str]) -> dict[str, Any]:
        agents = {
            name: RLAgent(name, connection, endpoint.model, enable_rl=True, rl_config=RL)
            for name in ("agent_a", "agent_b")
        }
        orchestrator = RLOrchestrator(agents, present, enable_rl=True, rl_config=RL)
        chunks = [chunk async for chunk in orchestrator.chat([{"role": "user", "content": task["question"]}])]
        return {"answer": chunks[-1]["content"], "votes": orchestrator.votes}

    return agl.wrap(discussion, reward=AGREED)


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(EXAMPLE, __doc__, argv)
    train = make_tasks(1024, seed=options.seed, split="train")
    held_out = make_tasks(48 if options.short else 128, seed=options.seed, split="held_out")
    run: dict[str, Any] = {"n_workers": 32, "seed": options.seed, "agents": ["agent_a"]}

    with common.provider(options, oracle) as endpoint:
        agent = build(endpoint)
        if options.debug:
            return common.debug(agent, train, options, agents=["agent_a"])
        start = options.model or common.tiny_policy(
            build,
            train[:256],
            beginner,
            options.out / "start",
            agents=["agent_a"],
            seed=options.seed,
            epochs=5 if options.short else 8,
            **LENGTHS,
        )
        grpo = agl.GRPO(
            model=start,
            steps=options.steps or (5 if options.short else 12),
            group_size=8,
            batch_size=16,
            learning_rate=3e-4,
            minibatches=4,
            schedule="linear",
            threads=options.threads,
            **LENGTHS,
        )
        result = agl.Trainer(grpo, directory=options.out / "grpo", **run).fit(agent, train)
        policies = {"before": start, "after": result.policy}
        report = agl.evaluate(agent, held_out, policies, directory=options.out / "evaluation", **run)
    return common.save(EXAMPLE, report, options)


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
