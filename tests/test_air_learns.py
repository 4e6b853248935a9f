"""A task that is rewarded only after three right tool calls in a row is learnt in half the steps with AIR."""

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

GOAL = 0.5
"""Success over the 64 rollouts of a step; about one in twenty succeeds at first."""

MOST_STEPS = 10
"""In which training with AIR must reach it."""

session: ContextVar[str] = ContextVar("session")
"""The user whose request is being served, as a web server knows it."""


def secret(tool: str, user: str) -> str:
    """What a tool tells about a user: two digits that nobody can guess."""
    return str(random.Random(f"{tool} {user}").randrange(10, 100))


def tools() -> list[BaseTool]:
    """Three that follow on each other: a tool refuses any number but the user's, or but the one that the tool before
    it told."""

    def made(name: str, needs: Callable[[str], str]) -> BaseTool:
        def use(number: str) -> str:
            """Use the number."""
            if number != needs(session.get()):
                raise ToolException(REFUSED)
            return secret(name, session.get())

        built = tool(name)(use)
        built.handle_tool_error = True
        return built

    before = [lambda user: user, *(functools.partial(secret, name) for name in CLERK_TOOLS[:-1])]
    return [made(name, needs) for name, needs in zip(CLERK_TOOLS, before, strict=True)]


def clerk() -> Any:
    """An agent that must use every tool in turn, each with the number that it was told last, and answer with the
    last."""
    model: Any = ChatOpenAI(model="m", base_url="http://provider.invalid/v1", api_key="unused")  # type: ignore[arg-type]
    agent = create_agent(model, tools(), system_prompt=CLERK, name="clerk")

    async def serve(task: Any) -> str:
        session.set(task["user"])
        done = await agent.ainvoke({"messages": [{"role": "user", "content": asked_to_fetch(task["user"])}]})
        return done["messages"][-1].content

    return serve


def right(task: Any, output: str) -> float:
    return float(output == secret(CLERK_TOOLS[-1], task["user"]))


def rules() -> agl.AIR:
    air = agl.AIR()
    air.on_tool_success(name="tool_ok")(lambda tool_name: 0.5)
    air.on_tool_failure(name="tool_failed")(lambda error: -0.05)
    return air


def train(policy: Path, directory: Path, seed: int, steps: int, air: agl.AIR | None) -> list[float]:
    """Success in each step, and last on held-out tasks after training."""
    users = [str(u) for u in range(10, 100)]
    random.Random(0).shuffle(users)
    trainer = agl.Trainer(
        agl.GRPO(
            model=str(policy), group_size=8, batch_size=8, steps=steps, learning_rate=5e-4, betas=(0.9, 0.95),
            max_response_tokens=48, max_context=256, val_every=steps, max_batch=64,
        ),
        tracer=LangChainTracer(),
        credit=agl.credit.Discounted(1.0),
        air=air,
        n_workers=16,
        directory=directory,
        seed=seed,
        progress=False,
    )  # fmt: skip
    agent = agl.wrap(clerk(), reward=right, name="clerk")
    tasks = [{"user": u} for u in users]
    _, *history = trainer.fit(agent, tasks[30:], tasks[:30] * 2).history
    return [*(h["train/reward/reward"] for h in history), history[-1]["val/reward/reward"]]


def steps_to(goal: float, success: list[float]) -> int | None:
    return next((step for step, value in enumerate(success) if value >= goal), None)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_air_reaches_the_goal_in_half_the_steps(seed: int, role_policy: Path, tmp_path: Path) -> None:
    with_air = train(role_policy, tmp_path / "air", seed, MOST_STEPS, rules())
    reached = steps_to(GOAL, with_air)
    assert with_air[0] < 0.1, "the reward is sparse"
    assert reached is not None
    # In one step less than twice as many, training without has not reached it: it needs at least twice as many.
    without = train(role_policy, tmp_path / "plain", seed, 2 * reached - 1, None)
    print(f"seed {seed}: with AIR {with_air}, without {without}")
    assert without[0] == with_air[0], "both begin alike"
    assert steps_to(GOAL, without) is None
