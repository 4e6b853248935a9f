"""BFCL v4: an agent of the OpenAI Agents SDK calls the function that a question asks for, with the right arguments.

Questions, functions and accepted arguments are those of the package `bfcl-eval`, whose wheel is downloaded: its parts
"simple_python" and "multiple", one call each, of one function or of several to choose from.
"""

from __future__ import annotations

import argparse
import json
import random
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

import agl
from agl.testing.provider import Reply
from agl.trainer.quickstart.smollm2 import pypi_wheel
from examples.common import Endpoint
from examples.smollm2.recipe import Claim

PACKAGE = ("bfcl-eval==2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a")
PARTS = ("simple_python", "multiple")
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""BFCL's names of types -> those of JSON schema; "any" is no restriction."""

Task = dict[str, Any]
"""`id`, `question`, `functions` (name, description, JSON schema of the parameters), `answer` (function name, and for
each parameter what is accepted; "" where it may be left out)."""


def load(part: str) -> list[Task]:
    """The tasks of a part.

    Raises:
        HubError: the package cannot be downloaded.
    """
    with zipfile.ZipFile(pypi_wheel(*PACKAGE)) as wheel:
        rows, answers = (
            [json.loads(line) for line in wheel.read(f"bfcl_eval/data/{folder}BFCL_v4_{part}.json").splitlines()]
            for folder in ("", "possible_answer/")
        )
    return [
        {
            "id": row["id"],
            "question": row["question"][0][-1]["content"],
            "functions": [
                {
                    "name": _name(function["name"]),
                    "description": function["description"],
                    "parameters": _schema(function["parameters"]),
                }
                for function in row["function"]
            ],
            "answer": {_name(name): accepted for name, accepted in answer["ground_truth"][0].items()},
        }
        for row, answer in zip(rows, answers, strict=True)
    ]


def _name(name: str) -> str:
    """Without the dots, which OpenAI's API does not take; BFCL's own handlers do the same."""
    return name.replace(".", "_")


def _schema(bfcl: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {key: bfcl[key] for key in ("description", "enum", "required") if key in bfcl}
    if (kind := bfcl.get("type")) not in (None, "any"):
        schema["type"] = TYPES.get(kind, kind)
    if "properties" in bfcl:
        schema["properties"] = {name: _schema(inner) for name, inner in bfcl["properties"].items()}
    if "items" in bfcl:
        schema["items"] = _schema(bfcl["items"])
    return schema


# -- the agent ---------------------------------------------------------------------------------------------------------


def build(endpoint: Endpoint) -> Any:
    """A program that asks an agent with the task's functions, and returns the calls that it made."""
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(endpoint.model, AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key))

    async def assistant(task: Task) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def tool(name: str, description: str, parameters: dict[str, Any]) -> FunctionTool:
            async def invoke(_: Any, arguments: str) -> str:
                calls.append({"name": name, "arguments": json.loads(arguments or "{}")})
                return "done"

            return FunctionTool(name, description, parameters, invoke, strict_json_schema=False)

        agent = Agent(
            name="assistant",
            instructions="Call the function that answers the question.",
            tools=[tool(**function) for function in task["functions"]],
            tool_use_behavior="stop_on_first_tool",
            model=model,
        )
        await Runner.run(agent, task["question"])
        return calls

    return agl.wrap(assistant, reward=right_call)


# -- the reward --------------------------------------------------------------------------------------------------------


def right_call(task: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> float:
    """1.0 iff there is one call, of the right function, and each argument is one that BFCL accepts, else 0.0.

    The rule is that of BFCL's checker of calls by their syntax tree: texts are compared without case, spaces and
    ``,./-_*^``; a whole number may stand for a float; what may be left out accepts "".
    """
    ((name, accepted),) = task["answer"].items()
    if len(calls) != 1 or calls[0]["name"] != name or not isinstance(calls[0]["arguments"], Mapping):
        return 0.0
    arguments = calls[0]["arguments"]
    if not arguments.keys() <= accepted.keys():
        return 0.0
    return float(
        all(
            any(_same(arguments[key], value) for value in values) if key in arguments else "" in values
            for key, values in accepted.items()
        )
    )


def _same(value: Any, accepted: Any) -> bool:
    if isinstance(value, bool) or isinstance(accepted, bool):
        return value is accepted
    if isinstance(value, str) and isinstance(accepted, str):
        return _plain(value) == _plain(accepted)
    if isinstance(value, list) and isinstance(accepted, list):
        return len(value) == len(accepted) and all(map(_same, value, accepted))
    if isinstance(value, Mapping) and isinstance(accepted, Mapping):
        # Inside an object each key has its own list of accepted values.
        return value.keys() <= accepted.keys() and all(
            any(_same(value[key], each) for each in values) if key in value else "" in values
            for key, values in accepted.items()
        )
    return isinstance(value, int | float) and isinstance(accepted, int | float) and value == accepted


def _plain(text: str) -> str:
    return text.translate(str.maketrans("'", '"', " ,./-_*^")).lower()


# -- the expert --------------------------------------------------------------------------------------------------------


def expert(tasks: Sequence[Task]) -> Any:
    """A script that makes the right call, without what may be left out."""
    by_question = {task["question"]: task for task in tasks}

    def answer(body: dict[str, Any]) -> Reply:
        task = by_question[body["messages"][-1]["content"]]
        ((name, accepted),) = task["answer"].items()
        return Reply(tools=((name, _first(accepted)),))

    return answer


def _first(accepted: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {
        key: _first(values[0]) if isinstance(values[0], Mapping) else values[0]
        for key, values in accepted.items()
        if "" not in values
    }


def claim(options: argparse.Namespace) -> Claim:
    """The questions of both parts, each once, divided by the seed; the expert solves those that are not held out."""
    tasks = [task for part in PARTS for task in load(part)]
    random.Random(f"bfcl {options.seed}").shuffle(tasks)
    # Many questions are in both parts.
    tasks = list({task["question"]: task for task in tasks}.values())
    return Claim(
        build=build, train=tasks[96:], heldout=tasks[:96], recorded=tasks[96:288], expert=expert(tasks), steps=6,
        max_context=1024, max_response_tokens=64,
    )  # fmt: skip
