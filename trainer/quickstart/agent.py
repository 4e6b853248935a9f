"""The quickstart's agent: a LangChain `create_agent` agent with a calculator, as a user would write it."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from agl.trainer.quickstart.demos import SYSTEM_PROMPT
from agl.trainer.quickstart.tasks import calculate


@tool
def calculator(expression: str) -> str:
    """Calculate `a op b`, where a and b are integers and op is one of + - * /."""
    return calculate(expression)


def build_agent(base_url: str | None = None) -> Any:
    """The agent: a compiled graph that takes and returns `{"messages": [...]}`.

    Args:
        base_url: an OpenAI-compatible server; None for the SDK's default. Inside a rollout its calls go to the policy
            in training, regardless of this.
    """
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=SecretStr("unused"), max_completion_tokens=48)
    return create_agent(model, [calculator], system_prompt=SYSTEM_PROMPT, name="solver")
