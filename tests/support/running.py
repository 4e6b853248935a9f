"""Runs an agent by a scripted policy wherever rollouts can run, and looks at what came of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from openai import OpenAI
from scripted import ScriptedRollouts

import agl
from agl.trainer.store import open_store
from agl.trainer.store.types import Attempt


def say(llm: agl.LLM, text: str) -> str:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


def fit(agent: Any, tasks: list[Any], directory: Path, **options: Any) -> ScriptedRollouts:
    algorithm = ScriptedRollouts(["four"])
    trainer = agl.Trainer(algorithm, directory=directory, progress=False, **{"n_workers": 2, "timeout": 60.0} | options)  # type: ignore[arg-type]
    trainer.fit(agent, tasks)
    return algorithm


def attempts(directory: Path) -> list[list[Attempt]]:
    """Of every rollout, in the order of the tasks."""

    async def query() -> list[list[Attempt]]:
        store = await open_store(f"sqlite:///{directory / 'run.db'}")
        rollouts = sorted(await store.query_rollouts(), key=lambda r: r.index or 0)
        found = [await store.query_attempts(r.rollout_id) for r in rollouts]
        await store.close()
        return found

    return asyncio.run(query())


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends within a bound."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
