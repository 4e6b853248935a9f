"""The quickstart's agent: a LangChain `create_agent` agent with a calculator, as a user would write it."""

from __future__ import annotations

from typing import Any

from agl.errors import ConfigError
from agl.trainer.quickstart.demos import SYSTEM_PROMPT
from agl.trainer.quickstart.tasks import calculate


def build_agent(base_url: str | None = None) -> Any:
    """The agent, a compiled LangGraph graph.

    Args:
        base_url: an OpenAI-compatible server; None for the SDK's own default. While a rollout runs, its calls go to
            the policy in training instead.

    Raises:
        ConfigError: LangChain is not installed.
    """
    try:
        from langchain.agents import create_agent
        from langchain.tools import tool
        from langchain_openai import ChatOpenAI
        from pydantic import SecretStr
    except ImportError as error:
        raise ConfigError(
            f"the quickstart's agent needs LangChain: {error}", hint='pip install "agl[local,langchain]"'
        ) from error

    @tool
    def calculator(expression: str) -> str:
        """Calculate `a op b`, where a and b are integers and op is one of + - * /."""
        return calculate(expression)

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=SecretStr("unused"), max_completion_tokens=48)
    return create_agent(model, [calculator], system_prompt=SYSTEM_PROMPT, name="solver")
