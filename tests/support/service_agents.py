"""A client of a training server, a process of its own: an agent on OpenAI's or Anthropic's API, as users write it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.tools import tool

import agl
from agl.trainer.quickstart.demos import SYSTEM_PROMPT
from agl.trainer.quickstart.tasks import calculate

calculator = tool(lambda expression: calculate(expression), description="Calculate `a op b`.")  # pyright: ignore
calculator.name = "calculator"


def model(api: str, resource: Any) -> Any:
    if api == "openai":
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model="llama-3.2-3b", base_url=resource.model_api, api_key="not-used", max_retries=0)  # pyright: ignore
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(  # pyright: ignore
        model="claude-3-opus", base_url=resource.model_api, api_key="not-used", max_tokens=48, max_retries=0
    )


def solver(resource: Any, task: Any) -> float:
    agent = create_agent(model(API, resource), [calculator], system_prompt=SYSTEM_PROMPT, name="solver")
    said = agent.invoke({"messages": [("user", task.question)]})["messages"][-1].text
    return float(said.strip() == task.answer)


if __name__ == "__main__":
    API, out = sys.argv[1], Path(sys.argv[2])
    client = agl.Client(progress=False)
    if "--upload" in sys.argv:
        client.upload_data("train.jsonl", test_file="test.jsonl")
    print("ready", os.getpid(), flush=True)
    result = client.train(solver, nworkers=4)
    facts = {"run_id": result.run_id, "status": result.status, "history": result.history, "rewards": result.rewards}
    out.write_text(json.dumps({**facts, "policy": str(result.download(out.with_suffix("")))}))
