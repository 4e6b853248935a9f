"""Demonstrations of a calculator agent, good and bad, as text that the policy reads and text that it writes.

A demonstration is rendered exactly as the chat template renders the same conversation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl.trainer.quickstart.tasks import calculate, make_task, random_problem

SYSTEM_PROMPT = "Use the calculator."
TOOL_NAME = "calculator"

SYSTEM_PROMPTS = (
    SYSTEM_PROMPT,
    SYSTEM_PROMPT,
    "You are a helpful assistant.",
    "You are a careful agent. Use the calculator tool, then answer with the number.",
    "Answer with the result and nothing else.",
    "",
)
"""System prompts of agents; the policy should not depend on one wording."""

Quality = Mapping[str, float]

CAPABLE: Quality = {"good": 1.0}
"""From these the policy learns to write a call and to copy numbers."""

MIXED: Quality = {
    "good": 0.28,
    "guess": 0.64,
    "broken_json": 0.03,
    "wrong_operand": 0.02,
    "bad_expression": 0.01,
    "ignored_result": 0.02,
}
"""Mostly bad, in every way an agent fails: without the tool, with a call that does not parse, with the wrong numbers,
with an expression that the tool refuses, and with an answer that is not the tool's."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a demonstration.

    Attributes:
        prompt: text that the policy reads: what the template adds since the last turn.
        answer: text that it writes, including `<|im_end|>`.
    """

    prompt: str
    answer: str


Demo = tuple[Turn, ...]


def tool_call(expression: str) -> str:
    """The text with which the policy calls the calculator."""
    return call_of(TOOL_NAME, {"expression": expression})


def call_of(tool: str, arguments: Mapping[str, Any]) -> str:
    """The text with which the policy calls a tool."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def opening(question: str, system: str, tools: Sequence[str] = (TOOL_NAME,)) -> str:
    """The first prompt: system prompt, the tools' names, question, and the start of the answer."""
    head = "\n".join(filter(None, (system, f"Tools: {', '.join(tools)}" if tools else "")))
    return f"<|im_start|>system\n{head}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def tool_result(text: str) -> str:
    """The text that the template adds for a tool's answer."""
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def demonstrate(rng: random.Random, quality: Quality) -> Demo:
    """One demonstration on a random training problem, its behaviour drawn with the weights in `quality`."""
    a, op, b = random_problem(rng, "train")
    task = make_task(a, op, b)
    start = opening(task["question"], rng.choice(SYSTEM_PROMPTS))
    expression = f"{a} {op} {b}"
    match rng.choices(list(quality), weights=list(quality.values()))[0]:
        case "guess":
            return (Turn(start, f"I think it is {_some_number(rng)}<|im_end|>"),)
        case "broken_json":
            return (Turn(start, tool_call(expression).replace('"}}', '"}') + "<|im_end|>"),)
        case "wrong_operand":
            wrong = f"{_some_number(rng)} {op} {b}" if rng.random() < 0.5 else f"{a} {op} {_some_number(rng)}"
            return _call(start, wrong, calculate(wrong))
        case "bad_expression":
            return _call(start, f"{a} {b}", "I do not know")
        case "ignored_result":
            return _call(start, expression, _some_number(rng))
        case _:
            return _call(start, expression, task["answer"])


def _call(start: str, expression: str, answer: str) -> Demo:
    answer = "I do not know" if answer.startswith("error") else answer
    return (
        Turn(start, f"{tool_call(expression)}<|im_end|>"),
        Turn(tool_result(calculate(expression)), f"{answer}<|im_end|>"),
    )


def _some_number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.randint(1, 4)))
