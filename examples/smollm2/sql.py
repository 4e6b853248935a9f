"""The LangGraph program of `examples/text_to_sql`: the writer alone is trained, on databases of sql-eval.

The checker, the rewriter and the answerer are a script: the checker approves, so that what the writer asked decides.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agl
from agl.rewards import SQLResult
from agl.testing.provider import Reply
from examples.common import EXAMPLES, Endpoint
from examples.smollm2.recipe import Claim

sys.path.insert(0, str(EXAMPLES / "text_to_sql"))  # a folder of programs, which import each other by name
import agent as program
import databases

DATA = Path("../shared/data/sql_eval")
LONGEST_SCHEMA = 3000
"""Characters; databases with longer ones would not fit into the context."""


def others(body: dict[str, Any]) -> Reply:
    """The agents that are not trained."""
    return Reply("OK" if program.PROMPTS["checker"] in str(body["messages"][0]) else "Done.")


def expert(tasks: Sequence[dict[str, Any]]) -> Any:
    """The writer asks the reference query; the rest is as in training."""
    by_question = {task["question"]: task for task in tasks}

    def answer(body: dict[str, Any]) -> Reply:
        if program.PROMPTS["writer"] not in str(body["messages"][0]):
            return others(body)
        question = body["messages"][-1]["content"].rpartition("Question: ")[2]
        return Reply(tools=(("run_sql", {"query": by_question[question]["queries"][0]}),))

    return answer


def claim(options: argparse.Namespace) -> Claim:
    """The questions on databases with a short schema, divided by the seed."""
    data = options.data or DATA
    folder = Path(options.out or "runs/smollm2-sql") / "databases"
    databases.make_databases(data, folder)
    tasks = [t for t in databases.tasks(data, folder) if len(t["schema"]) <= LONGEST_SCHEMA]
    random.Random(f"sql {options.seed}").shuffle(tasks)
    match = SQLResult(f"{folder}/{{db}}.sqlite", answer="queries")

    def build(endpoint: Endpoint) -> Any:
        models = program.chat_models(endpoint.model, endpoint.url, endpoint.key, 128)
        return agl.wrap(
            program.program(program.nodes(models)),
            reward=match,
            output=lambda state: state["query"],
            input=lambda task: {
                "id": task["id"], "question": task["question"], "schema": task["schema"],
                "database": str(folder / f"{task['db']}.sqlite"),
            },
        )  # fmt: skip

    n_heldout = len(tasks) // 4
    return Claim(
        build=build, train=tasks[n_heldout:], heldout=tasks[:n_heldout], recorded=tasks[n_heldout:],
        expert=expert(tasks), others=others, agents="writer", steps=4, max_context=1536, max_response_tokens=128,
    )  # fmt: skip
