"""An agent with a calculator and its reward. It imports nothing from agl."""

from __future__ import annotations

import operator
import re
from typing import Any

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@tool
def calculator(expression: str) -> str:
    """Calculate `a op b`, where a and b are integers and op is one of + - * /."""
    parts = re.fullmatch(r"\s*(\d+)\s*([-+*/])\s*(\d+)\s*", expression)
    if parts is None or (parts[2] == "/" and int(parts[3]) == 0):
        return "error: write a op b"
    return str(OPERATIONS[parts[2]](int(parts[1]), int(parts[3])))


def build(base_url: str, model: str, api_key: str) -> Any:
    """The agent, on the model of a server that speaks OpenAI's protocol."""
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key, max_completion_tokens=48)  # type: ignore[arg-type]
    return create_agent(chat, [calculator], system_prompt="Use the calculator.", name="solver")


def reward(task: dict[str, Any], output: Any) -> float:
    """1 for the exact answer."""
    return float(str(output).strip() == task["answer"])
