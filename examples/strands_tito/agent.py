"""The agent: Strands with a calculator, as one rollout. The runner passes the task and the LLM."""

from __future__ import annotations

import operator
import re
from typing import Any

from strands import Agent, tool
from strands.models.openai import OpenAIModel

import agl
from agl.adapters.strands import StrandsTracer

# Names the agents and tools in the spans; without it only the model's calls are seen.
StrandsTracer().instrument()

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@tool
def calculator(expression: str) -> str:
    """Calculate `a op b`, where a and b are integers and op is one of + - *."""
    match = re.fullmatch(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*", expression)
    return str(_OPERATORS[match[2]](int(match[1]), int(match[3]))) if match else "error: bad expression"


@agl.rollout
async def my_rollout(task: Any, llm: agl.LLM) -> float:
    """1.0 if the agent answers the task, else 0.0."""
    model = OpenAIModel(
        client_args={"base_url": llm.endpoint, "api_key": llm.api_key or "not-used"},
        model_id=llm.model,
        params={"max_tokens": 64, **llm.sampling_parameters},
    )
    agent = Agent(
        model=model, tools=[calculator], system_prompt="Use the calculator.", name="solver", callback_handler=None
    )
    answer = str(await agent.invoke_async(task.question))
    return float(task.answer in re.findall(r"-?\d+", answer))
