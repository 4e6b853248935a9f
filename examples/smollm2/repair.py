"""One-file repairs by mini-swe-agent, as it is: a function with one bug, a failing test, and hidden tests.

The expert is a script that plays the model: it looks at the function and at the test, and replaces the bug with sed.
Needs mini-swe-agent (docs/harnesses.md) and a sandbox (docs/security.md).
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agl
from agl.messages import read
from agl.testing.provider import Reply
from examples.common import Endpoint
from examples.smollm2.recipe import Claim

Task = dict[str, Any]

# What it says to a small model, whose context has no room for mini's own prompt.
CONFIG = r"""
agent:
  system_template: You repair programs. Answer with one command.
  instance_template: |
    Repair solution.py, line by line. {{task}}
    Answer with one command between ```sh and ```.
  step_limit: 4
  cost_limit: 0
environment: {timeout: 10}
model:
  model_class: litellm_textbased
  action_regex: '```sh\s*\n(.*?)\n```'
  observation_template: "{{output.output[:600]}}"
  format_error_template: "Answer with one command between ```sh and ```."
  model_kwargs: {drop_params: true}
"""
LOOK = "cat -n solution.py; python3 test.py 2>&1 | tail -1"
DONE = "python3 test.py && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

# Kind of bug -> functions that may have it: what each does, its arguments, its lines with @ in the place of the right
# and of the wrong text, and what it is called with.
KINDS: dict[str, tuple[tuple[str, str, str, str, str, str], ...]] = {
    "operator": (
        ("The sum of x and K.", "x", "return x @ K", "+", "-", "n"),
        ("The product of x and K.", "x", "return x @ K", "*", "+", "n"),
    ),
    "comparison": (
        ("The numbers above K.", "xs", "return [x for x in xs if x @ K]", ">", "<", "l"),
        ("The numbers below K.", "xs", "return [x for x in xs if x @ K]", "<", ">", "l"),
    ),
    "bound": (
        ("The numbers from 1 to x, with x.", "x", "return list(range(1, @))", "x + 1", "x", "p"),
        ("The sum of the numbers from 0 to x, with x.", "x", "return sum(range(@))", "x + 1", "x", "p"),
    ),
    "boundary": (
        ("How many numbers are K or more.", "xs", "return sum(x @ K for x in xs)", ">=", ">", "k"),
        ("Whether x is K or less.", "x", "return x @ K", "<=", "<", "K"),
    ),
    "start": (
        ("The product of the numbers.", "xs", "out = @\nfor x in xs:\n    out = out * x\nreturn out", "1", "0", "l"),
        ("The sum of the numbers.", "xs", "out = @\nfor x in xs:\n    out = out + x\nreturn out", "0", "1", "l"),
    ),
    "variable": (
        ("The larger of a and b.", "a, b", "return a if a > b else @", "b", "a", "nn"),
        ("The sum of the squares of a and b.", "a, b", "return a * a + b * @", "b", "a", "nn"),
    ),
    "negation": (
        ("The numbers that are not K.", "xs", "return [x for x in xs if @ K]", "x !=", "x ==", "k"),
        ("The numbers that are not in ys.", "xs, ys", "return [x for x in xs if x @ ys]", "not in", "in", "kk"),
    ),
    "logic": (
        ("Whether x is above 0 and below K.", "x", "return x > 0 @ x < K", "and", "or", "n"),
        ("Whether x is below 0 or above K.", "x", "return x < 0 @ x > K", "or", "and", "n"),
    ),
    "index": (
        ("The last number.", "xs", "return xs[@]", "-1", "0", "l"),
        ("The first number and K.", "xs", "return xs[@] + K", "0", "1", "l"),
    ),
    "method": (
        ("The text in capitals.", "s", "return s.@()", "upper", "lower", "s"),
        ("The largest number.", "xs", "return @(xs)", "max", "min", "l"),
    ),
    "order": (
        ("What is left of a without b.", "a, b", "return @", "a - b", "b - a", "nn"),
        ("The text a, then the text b.", "a, b", "return @", "a + b", "b + a", "ss"),
    ),
    "result": (
        ("How many numbers are above K.", "xs", "n = 0\nfor x in xs:\n    n += x > K\nreturn @", "n", "K", "l"),
        ("The sum of a and b, twice.", "a, b", "c = a + b\nreturn @", "2 * c", "c", "nn"),
    ),
}
NAMES = {
    False: ("solve", "work", "find", "get", "compute", "result", "value", "apply"),
    True: ("answer", "run", "do", "make"),
}
CONSTANTS = {False: (2, 3, 5, 6, 8), True: (4, 7, 9)}
"""Of held-out tasks or not: no held-out program is one that was imitated."""
WORDS = ("pear", "Fig", "plum", "Kiwi", "Lime", "date", "Nut", "corn", "Rice", "beet")


def tasks(n: int, seed: int, *, heldout: bool = False) -> list[Task]:
    """Generated tasks, the kinds in turn; the same for the same arguments."""
    rng, made = random.Random(f"repair-{seed}"), list[Task]()
    while len(made) < n:
        kind = list(KINDS)[len(made) % len(KINDS)]
        constant = rng.choice(CONSTANTS[heldout])
        doc, names, body, right, wrong, calls = (
            re.sub(r"\bK\b", str(constant), text) if i < 5 else text for i, text in enumerate(rng.choice(KINDS[kind]))
        )
        name = rng.choice(NAMES[heldout])
        lines = ["    " + line for line in [f'"""{doc}"""', *body.split("\n")]]
        at = next(i for i, line in enumerate(lines) if "@" in line)
        good, bad = (
            "\n".join([f"def {name}({names}):", *lines, ""]).replace("@", fragment) for fragment in (right, wrong)
        )
        values = [[_argument(c, constant, rng) for c in calls] for _ in range(12)]
        results = [(args, _value(good, name, args), _value(bad, name, args)) for args in values]
        differ = [one for one in results if one[1] != one[2]]
        if len(differ) < 2:
            continue
        tests = [f"assert {name}({', '.join(map(repr, args))}) == {value!r}" for args, value, _ in results]
        shown, expected, _ = differ[0]
        call = f"{name}({', '.join(map(repr, shown))})"
        made.append({
            "kind": kind, "broken": bad, "hidden": tests,
            "test": f"from solution import {name}\ngot = {call}\n"
            f"assert got == {expected!r}, f{f'{call} is {{got}}, not {expected!r}'!r}\n",
            # With what is before it: the first place where the wrong text stands need not be the bug.
            "fix": [at + 2, *_fragments(lines[at], wrong, right)],
        })  # fmt: skip
    return made


def _argument(kind: str, constant: int, rng: random.Random) -> Any:
    match kind:
        case "n":
            return rng.randint(-9, 20)
        case "p":
            return rng.randint(1, 6)
        case "K":
            return constant + rng.randint(-1, 1)
        case "s":
            return rng.choice(WORDS)
        case "k":
            return [constant + rng.randint(-1, 1) for _ in range(rng.randint(2, 4))]
        case _:
            return [rng.randint(-5, 15) for _ in range(rng.randint(2, 4))]


def _value(source: str, name: str, arguments: list[Any]) -> Any:
    scope: dict[str, Any] = {}
    exec(source, scope)  # ours, and not a policy's
    return scope[name](*arguments)


def _fragments(line: str, wrong: str, right: str) -> tuple[str, str]:
    """The shortest text that ends with the bug and is nowhere before it on its line, and what it has to be."""
    before = line.partition("@")[0]
    for start in range(len(before), -1, -1):
        old = before[start:] + wrong
        if line.replace("@", wrong).find(old) == start and not old.startswith(" "):
            return old, before[start:] + right
    raise AssertionError(line)


def fixed(task: Task) -> str:
    """The command that repairs it."""
    number, old, new = task["fix"]
    pattern, text = re.sub(r"([\[\]*.])", r"\\\1", old), new.replace("&", r"\&")
    return f"sed -i '{number}s/{pattern}/{text}/' solution.py && {DONE}"


def files(task: Task) -> dict[str, str]:
    """The working copy."""
    return {"solution.py": task["broken"], "test.py": task["test"]}


def grade(task: Task, folder: Path) -> float:
    """1 if the function passes all hidden tests."""
    source = agl.rewards.read_text(folder / "solution.py")
    return float(agl.rewards.PythonTests()({"tests": task["hidden"]}, f"```python\n{source}\n```") == 1)


def expert(known: list[Task]) -> Callable[[dict[str, Any]], Reply]:
    """What plays the model: it looks, and then repairs the function that it has seen."""
    by_source = {numbered(task["broken"]): task for task in known}

    def script(body: dict[str, Any]) -> Reply:
        seen = read.body(body)[-1].text
        task = next((task for source, task in by_source.items() if source in seen), None)
        return Reply(f"```sh\n{LOOK if task is None else fixed(task)}\n```")

    return script


def numbered(source: str) -> str:
    """A file as `cat -n` shows it."""
    return "".join(f"{number:6}\t{line}\n" for number, line in enumerate(source.splitlines(), 1))


def build(endpoint: Endpoint, **settings: Any) -> agl.Agent:
    """mini-swe-agent on a provider; a policy's calls go to the policy."""
    return agl.harness(
        "mini-swe-agent",
        task=lambda task: "test.py fails.",
        files=files,
        grade=grade,
        words=["-c", "/tmp/home/repair.yaml"],
        home={"repair.yaml": CONFIG},
        env={"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key},
        timeout=60,
        error_reward=0.0,
        **settings,
    )


def claim(options: argparse.Namespace) -> Claim:
    """The program's parts: 120 repairs are imitated, and others tried."""
    made = tasks(312, options.seed)
    recorded = made[:120]
    return Claim(
        build=build, train=made[120:], heldout=tasks(48, options.seed, heldout=True), recorded=recorded,
        expert=expert(recorded), imitation={"epochs": 2, "batch_size": 8, "learning_rate": 5e-5},
        steps=6, batch_size=6, group_size=6, learning_rate=1e-5, max_context=768, max_response_tokens=64,
        # Each is a Python program that imports for seconds.
        short=2, more={"n_workers": 4},
    )  # fmt: skip
