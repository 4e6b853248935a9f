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


def build_agent(model: Any = None, *, system_prompt: str = SYSTEM_PROMPT, max_tokens: int = 48) -> Any:
    """The agent: a compiled graph that takes and returns `{"messages": [...]}`.

    Args:
        model: a chat model of LangChain; None for OpenAI's client. Inside a rollout its calls go to the policy in
            training, whatever server it is for.
        max_tokens: limit of an answer.
    """
    model = model or ChatOpenAI(model="policy", api_key=SecretStr("unused"), max_completion_tokens=max_tokens)
    return create_agent(model, [calculator], system_prompt=system_prompt, name="solver")


if __name__ == "__main__":
    import sys

    for message in build_agent().invoke({"messages": [("user", sys.argv[1])]})["messages"]:
        message.pretty_print()
