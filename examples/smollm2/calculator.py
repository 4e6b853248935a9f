"""The agent of `examples.calc_x` in Microsoft Agent Framework: word problems with a calculator.

Problems are Calc-X's own rows and, in Calc-X's form, those of GSM8K that take one or two calculations: GSM8K is one of
the datasets that Calc-X was made of, and its annotations are the calculator's inputs.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agl
from agl.testing.provider import Reply
from examples.calc_x import agent as calc_x
from examples.calc_x.tasks import Task, load, reward
from examples.common import Endpoint
from examples.smollm2.recipe import Claim

DATA = Path("../shared/data")
GADGET = re.compile(r'<gadget id="calculator">(.*?)</gadget>')


def gsm8k(file: Path, longest: int = 2) -> list[Task]:
    """The problems of GSM8K with at most `longest` calculations, as records of Calc-X."""
    tasks = []
    for i, line in enumerate(file.read_text("utf-8").splitlines()):
        row = json.loads(line)
        chain = [step.partition("=")[::2] for step in re.findall(r"<<(.*?)>>", row["answer"])]
        result = row["answer"].rpartition("####")[2].strip().replace(",", "")
        if 0 < len(chain) <= longest and chain[-1][1] == result:
            gadgets = [f'<gadget id="calculator">{a}</gadget>\n<output>{b}</output>' for a, b in chain]
            text = "\n\n".join([*gadgets, f"<result>{result}</result>"])
            name = f"gsm8k__{file.stem}_{i}"
            tasks.append({"id": name, "question": row["question"], "chain": text, "result": result, "source": "gsm8k"})
    return tasks


def build(endpoint: Endpoint) -> Any:
    """The agent of `examples.calc_x`, with its reward."""
    return agl.wrap(calc_x.build(endpoint.url, endpoint.model, endpoint.key), reward=reward, name=calc_x.NAME)


def expert(tasks: Sequence[Task]) -> Any:
    """A script that does the calculations of the data, one after another."""
    by_question = {task["question"]: task for task in tasks}

    def answer(body: dict[str, Any]) -> Reply:
        said = [message for message in body["messages"] if message["role"] == "user"][-1]["content"]
        task = by_question[said if isinstance(said, str) else "".join(part["text"] for part in said)]
        done = sum(message["role"] == "tool" for message in body["messages"])
        steps = GADGET.findall(task["chain"])
        if done < len(steps):
            return Reply(tools=(("calculator", {"expression": steps[done]}),))
        return Reply(f"### {task['result']}")

    return answer


def claim(options: argparse.Namespace) -> Claim:
    """All rows of Calc-X at hand, and of GSM8K as many as there is time for."""
    data = options.data or DATA
    rng = random.Random(f"calc_x {options.seed}")
    calc, more = load(data / "calc_x" / "train.jsonl"), gsm8k(data / "gsm8k" / "train.jsonl")
    rng.shuffle(more)
    unseen = gsm8k(data / "gsm8k" / "test.jsonl")
    rng.shuffle(unseen)
    heldout = [*load(data / "calc_x" / "test.jsonl"), *unseen[:108]]
    recorded = [*calc, *more[:192]]
    return Claim(
        build=build, train=more, heldout=heldout, recorded=recorded, expert=expert(recorded), steps=8,
        max_context=640, max_response_tokens=48,
    )  # fmt: skip
