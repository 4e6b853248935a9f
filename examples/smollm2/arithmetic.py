"""A LangChain agent without tools answers questions of `reasoning-gym`: sums and differences of two numbers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

import agl
from examples.common import Endpoint
from examples.smollm2.recipe import Claim, last_number

SYSTEM_PROMPT = "Give the answer alone."
SIZES: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 40},
}
"""Kinds of questions -> their sizes, as reasoning-gym names both."""

STEPS = {"chain_sum": 12, "gcd": 20}


def build(endpoint: Endpoint) -> Any:
    """The agent: a question, an answer."""
    model = ChatOpenAI(
        model=endpoint.model, base_url=endpoint.url, api_key=SecretStr(endpoint.key), max_completion_tokens=24
    )
    return agl.wrap(create_agent(model, [], system_prompt=SYSTEM_PROMPT, name="solver"), reward=score)


def score(task: Mapping[str, Any], output: object) -> float:
    """reasoning-gym's score of the answer, whose number is taken out of the text if the task's answer is a number; 1.0
    for the right one, else 0.0."""
    dataset = reasoning_gym.create_dataset(task["kind"], size=1, seed=0, **SIZES[task["kind"]])
    answer = str(output).strip().rstrip(".")
    if last_number(task["answer"]) == task["answer"]:
        answer = last_number(answer) or answer
    return float(dataset.score_answer(answer, json.loads(task["entry"])) >= 1)


def questions(kind: str, n: int, *, seed: int) -> list[dict[str, str]]:
    """`n` questions; the same ones for the same seed."""
    dataset = reasoning_gym.create_dataset(kind, size=n, seed=seed, **SIZES[kind])
    return [
        {"kind": kind, "question": entry["question"], "answer": entry["answer"], "entry": json.dumps(entry)}
        for entry in dataset
    ]


def claim(options: argparse.Namespace, kind: str = "chain_sum") -> Claim:
    """Questions to train on, and others to measure with."""
    heldout = questions(kind, 128, seed=1_000_000 + options.seed)
    asked = {task["question"] for task in heldout}
    train = [task for task in questions(kind, 512, seed=options.seed) if task["question"] not in asked]
    return Claim(
        build=build, train=train, heldout=heldout, steps=STEPS[kind], max_context=256, max_response_tokens=24
    )  # fmt: skip
