"""Runs that a dashboard shows, made by real trainings, and the dashboard itself behind a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI

import agl
from agl.adapters.langchain import LangChainTracer
from agl.trainer.dashboard.server import link, serving_beside
from agl.trainer.dashboard.sources import find_sources
from agl.trainer.http.auth import Keys
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import Rollout

MARKUP = "<script>fetch('http://evil.test/')</script><img src=x onerror=\"document.title='owned'\">"
CONTROL = "\x1b[2J\x1b]0;owned\x07\u202egnp.exe\u2066"
HOSTILE = f"{MARKUP} {CONTROL}"


def train_hostile(model: Path, directory: Path, *, steps: int = 2) -> agl.Result:
    """Train a policy that knows nothing, on tasks, with an agent and with a tool whose texts attack whoever shows them.

    Of each step's eight rollouts one fails at its first attempt; every rollout has a call that forks from another.
    """

    @tool
    def lookup(word: str) -> str:
        """Look a word up."""
        return HOSTILE

    policy = ChatOpenAI(model="any", api_key="unused")  # type: ignore[arg-type]
    agent: Any = create_agent(policy, [lookup], name=HOSTILE)
    numbers = iter(range(10_000))
    failed: set[str] = set()

    @agl.rollout
    async def program(task: Any) -> None:
        await lookup.ainvoke({"word": HOSTILE})
        # Before the policy has answered: after an answer that was cut, this would be the policy's own failure.
        if "fails" in str(task) and len(failed) < 1:
            failed.add(str(task))
            raise ValueError(HOSTILE)
        first = [{"role": "user", "content": f"{task}"}]
        said = (await agent.ainvoke({"messages": first}))["messages"][-1].content
        rewritten = [{"role": "assistant", "content": f"not {said}"}, {"role": "user", "content": "again"}]
        await agent.ainvoke({"messages": first + rewritten})
        agl.emit_reward(next(numbers) % 3)

    trainer = agl.Trainer(
        agl.GRPO(
            model=str(model), group_size=4, batch_size=2, steps=steps, max_response_tokens=12, val_every=1,
            max_context=512,
        ),
        tracer=LangChainTracer(),
        directory=directory,
        progress=False,
        max_attempts=2,
    )  # fmt: skip
    return trainer.fit(program, [f"one {HOSTILE}", "one that fails"], ["held out", f"held out {HOSTILE}"])


def train_arithmetic(policy: Path, directory: Path, *, steps: int = 3, learning_rate: float = 5e-4) -> agl.Result:
    """A short quickstart: its agent, its tasks, its tiny policy."""
    from agl.trainer.quickstart.agent import build_agent

    trainer = agl.Trainer(
        agl.GRPO(
            model=str(policy), group_size=8, batch_size=4, steps=steps, learning_rate=learning_rate, betas=(0.9, 0.95),
            max_response_tokens=48, max_context=256, val_every=steps, max_batch=64,
        ),
        n_workers=16,
        directory=directory,
        progress=False,
    )  # fmt: skip
    return trainer.fit(
        agl.wrap(build_agent(), reward=exact_answer),
        arithmetic_tasks(64, seed=0, split="train"),
        arithmetic_tasks(32, seed=0, split="heldout"),
    )


class Dashboard:
    """A dashboard that listens. `get` reads its API with the key."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        self.link = link(url, key)

    def get(self, path: str, *, key: str | None = None, **options: Any) -> httpx.Response:
        key = self.key if key is None else key
        headers = ({"authorization": f"Bearer {key}"} if key else {}) | options.pop("headers", {})
        return httpx.get(f"{self.url}/{path}", headers=headers, timeout=60, **options)

    def post(self, path: str, value: Any) -> httpx.Response:
        return httpx.post(
            f"{self.url}/api/{path}", json=value, headers={"authorization": f"Bearer {self.key}"}, timeout=60
        )

    def json(self, path: str) -> Any:
        answer = self.get(f"api/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def served(*places: str | Path) -> Iterator[Dashboard]:
    """The dashboard of run directories and stores."""
    keys = Keys.mint()
    with serving_beside(find_sources([str(place) for place in places]), keys) as url:
        yield Dashboard(url, str(keys.minted))


def rollouts(directory: Path, **which: Any) -> list[Rollout]:
    async def query() -> list[Rollout]:
        store: Store = await open_store(f"sqlite:///{directory / 'run.db'}")
        try:
            return await store.query_rollouts(**which)
        finally:
            await store.close()

    return asyncio.run(query())
