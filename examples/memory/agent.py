"""A clerk that talks to a shop's customers, with tools that it is given. It imports nothing from agl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

NAME = "clerk"


def build(base_url: str, model: str, api_key: str, tools: Sequence[Callable[..., Any]]) -> Any:
    """The agent, on the model of a server that speaks OpenAI's protocol.

    Args:
        tools: functions; the one called `recall` searches what the clerk was told before.
    """
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key, max_completion_tokens=48)  # type: ignore[arg-type]
    return create_agent(chat, list(tools), system_prompt="You are the clerk of a shop.", name=NAME)
