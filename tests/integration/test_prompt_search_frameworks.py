"""Each framework's agent, unchanged: GEPA and APO replace its system prompt in its requests, and it gets better."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from rules import current
from subject_agent_framework import AgentFramework
from subject_autogen import AutoGen
from subject_langgraph import LangGraph
from subject_openai_agents import OpenAIAgents
from subject_strands import Strands
from subjects import LangChain

import agl
from agl.testing.provider import Reply, serve
from agl.testing.subject import Subject

FRAMEWORKS = (AgentFramework, AutoGen, LangChain, LangGraph, OpenAIAgents, Strands)
TASKS = [{"question": f"q{i}"} for i in range(7)]
OWN, RULE = 'Answer "briefly".', "be polite"


def script(body: dict[str, Any]) -> Reply:
    """Obeys the rule if the request has it anywhere; adds it to a text that it is asked to rewrite."""
    text = str(body["messages"][-1]["content"])
    if body["model"] in ("critic", "rewriter"):
        return Reply(f"```\n{current(text)} And {RULE}.\n```")
    return Reply("yes please" if RULE in json.dumps(body) else "yes")


@pytest.mark.parametrize(
    ("framework", "algorithm"),
    [
        pytest.param(
            framework, algorithm, id=f"{framework.name}-{algorithm}", marks=[pytest.mark.night] if (i + j) % 2 else []
        )
        for i, framework in enumerate(FRAMEWORKS)
        for j, algorithm in enumerate(("gepa", "apo"))
    ],
)
def test_system_prompt_gets_better(tmp_path: Path, framework: type[Subject], algorithm: str) -> None:
    subject = copy.copy(framework())
    assert subject.takes_prompt
    subject.prompt = OWN
    with serve(script) as provider:

        def work(task: dict[str, str]) -> str:
            agent = subject.agent(provider.url, "solver")
            if subject.ways:
                return getattr(agent, subject.ways[0])(task["question"])
            return asyncio.run(getattr(agent, subject.async_ways[0])(task["question"]))

        if algorithm == "gepa":
            search: Any = agl.GEPA(reflection=agl.LLM(provider.url, "rewriter"), budget=20, held_out=TASKS[5:])
        else:
            client = AsyncOpenAI(base_url=provider.url, api_key="k")
            sizes = {"beam_width": 1, "branch_factor": 1, "beam_rounds": 1, "gradient_batch_size": 2}
            models = {"gradient_model": "critic", "apply_edit_model": "rewriter"}
            search = agl.APO(client, **models, **sizes, held_out=TASKS[5:])
        agent = agl.wrap(work, reward=lambda task, output: float("please" in output), name="program")
        trainer = agl.Trainer(
            search, tracer=subject.tracer(), agents="solver", directory=tmp_path, n_workers=4, progress=False
        )
        result = trainer.fit(agent, TASKS[:3], TASKS[3:5])
    assert result.prompts == {"solver": f"{OWN} And {RULE}."}
    end = result.history[-1]
    assert (end["held_out/start/reward"], end["held_out/reward"]) == (0.0, 1.0)
