"""Recorded rollouts of an agent with a calculator, whose policy is a script, for tests of `agl.traces`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripted import TOOLS, Asked, ScriptedRollouts

import agl
from agl.mdp.types import Call

TASKS = [{"question": f"{a} + {b}", "answer": a + b} for a, b in ((1, 2), (3, 4), (5, 6))]


@agl.rollout
async def solver(task: Any, llm: agl.LLM) -> dict[str, float]:
    """Asks with a calculator, runs it, asks again."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    while True:
        reply = await client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = eval(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    right = message.content == str(task["answer"])
    return {"correct": float(right), "reward": float(right)}


def record(folder: Path, policy: Callable[[Asked], str], **options: Any) -> list[list[Call]]:
    """Two rollouts of each task, one after the other, in a run's directory; the calls of each."""
    algorithm = ScriptedRollouts(policy, group_size=2)
    agl.Trainer(algorithm, directory=folder, n_workers=1, seed=0, progress=False, **options).fit(solver, TASKS)
    return algorithm.calls


def saved(tokenizer: Any, folder: Path) -> str:
    """The directory of a student, of which only the tokenizer is read."""
    tokenizer.save_pretrained(folder)
    return str(folder)
