"""An agent and its reward, written without training in mind: nothing here imports agl."""

import operator
import os
import re

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@tool
def calculator(expression: str) -> str:
    """Calculate `a op b`, where a and b are integers and op is one of + - * /."""
    match = re.fullmatch(r"(\d{1,12}) ([-+*/]) (\d{1,12})", expression)
    if match is None or (match[2] == "/" and int(match[3]) == 0):
        return "error: bad expression"
    return str(OPERATIONS[match[2]](int(match[1]), int(match[3])))


model = ChatOpenAI(
    model=os.environ.get("MODEL", "gpt-4.1-mini"),
    api_key=os.environ.get("OPENAI_API_KEY", "set OPENAI_API_KEY to run this agent without training"),
    max_completion_tokens=48,
)
agent = create_agent(model, [calculator], system_prompt="Use the calculator.", name="solver")


def reward(task: dict, output: str) -> float:
    """1 if the agent's last message is the answer and nothing else."""
    return float(output.strip() == task["answer"])
