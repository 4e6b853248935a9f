"""A task that is rewarded only after four right tool calls in a row is learnt in half the steps with AIR."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import BaseTool, ToolException, tool
from langchain_openai import ChatOpenAI
from roles import CLERK, CLERK_TOOLS, REFUSED, asked_to_fetch

import agl
from agl.adapters.langchain import LangChainTracer

pytestmark = pytest.mark.slow

GOAL = 0.4
"""Success; about one rollout in a hundred succeeds at first."""

MOST_STEPS = 14
"""In which training with AIR must reach it; it took 8 to 11."""

session: ContextVar[str] = ContextVar("session")
"""The user whose request is being served, as a web server knows it."""


def secret(tool: str, user: str) -> str:
    """What a tool gives for a user: two digits that nobody can guess."""
    return str(random.Random(f"{tool} {user}").randrange(10, 100))


def tools() -> list[BaseTool]:
    """They follow on each other: each refuses any number but the user's, or but the one that the tool before gave."""

    def made(name: str, needs: Callable[[str], str]) -> BaseTool:
        def use(number: str) -> str:
            """Use the number."""
            if number != needs(session.get()):
                raise ToolException(REFUSED)
            return f"{CLERK_TOOLS[name]} {secret(name, session.get())}"

        built = tool(name)(use)
        built.handle_tool_error = True
        return built

    before = [lambda user: user, *(functools.partial(secret, name) for name in list(CLERK_TOOLS)[:-1])]
    return [made(name, needs) for name, needs in zip(CLERK_TOOLS, before, strict=True)]


def clerk() -> Any:
    """An agent that must use every tool in turn, each with the number that it was given last, and answer with the
    last."""
    model: Any = ChatOpenAI(model="m", base_url="http://provider.invalid/v1", api_key="unused")  # type: ignore[arg-type]
    agent = create_agent(model, tools(), system_prompt=CLERK, name="clerk")

    async def serve(task: Any) -> str:
        session.set(task["user"])
        done = await agent.ainvoke({"messages": [{"role": "user", "content": asked_to_fetch(task["user"])}]})
        return done["messages"][-1].content

    return serve


def right(task: Any, output: str) -> float:
    return float(output == secret(list(CLERK_TOOLS)[-1], task["user"]))


def rules() -> agl.AIR:
    air = agl.AIR()
    air.on_tool_success(name="tool_ok")(lambda tool_name: 0.5)
    air.on_tool_failure(name="tool_failed")(lambda error: -0.05)
    return air


def train(policy: Path, directory: Path, seed: int, steps: int, air: agl.AIR | None) -> list[float]:
    """Success after each step: over its rollouts and those of the step before it, 64 in all. AIR's rewards are not in
    it."""
    # Calls are compared in the same state: a return-to-go, against one mean of all calls, punishes every last call.
    trainer = agl.Trainer(
        agl.GRPO(
            model=str(policy), group_size=8, batch_size=4, steps=steps, learning_rate=5e-4, betas=(0.9, 0.95),
            max_response_tokens=48, max_context=256, max_batch=64, checkpoint_every=steps,
        ),
        tracer=LangChainTracer(),
        credit=agl.credit.TurnGroups(gamma=1.0),
        air=air,
        n_workers=16,
        directory=directory,
        seed=seed,
        progress=False,
    )  # fmt: skip
    agent = agl.wrap(clerk(), reward=right, name="clerk")
    history = trainer.fit(agent, [{"user": str(user)} for user in range(10, 100)]).history
    success = [h["train/reward/reward"] for h in history]
    assert len(success) == steps
    return [sum(pair) / 2 for pair in zip([success[0], *success], success, strict=False)]


@pytest.mark.night
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_air_reaches_the_goal_in_at_most_half_the_steps(seed: int, role_policy: Path, tmp_path: Path) -> None:
    with_air = train(role_policy, tmp_path / "air", seed, MOST_STEPS, rules())
    reached = next((step for step, success in enumerate(with_air, start=1) if success >= GOAL), None)
    assert with_air[0] < 0.1, "the reward is sparse"
    assert reached is not None
    # Half the steps or less, if without AIR it is not reached in one step less than twice as many.
    without = train(role_policy, tmp_path / "without", seed, 2 * reached - 1, None)
    best = max(without)
    print(f"\nseed {seed}: {GOAL} with AIR in {reached} steps; without, {best:.3f} at best in {len(without)} steps")
    assert abs(without[0] - with_air[0]) < 0.05, "both begin alike"
    assert best < GOAL
