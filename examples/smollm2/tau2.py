"""tau2's airline and retail domains: databases, policies, tasks and splits from the package inspect-evals; the reward.

The package's wheel is downloaded once and read in place; none of its files is part of this project.
"""

from __future__ import annotations

import functools
import gzip
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from agl.errors import DatasetError
from agl.trainer.quickstart.smollm2 import pypi_wheel
from examples.customer_service.environment import Environment
from examples.customer_service.retail import Retail
from examples.smollm2.airline import Airline

PACKAGE = ("inspect-evals==0.28.0", "1d5735999b1c4e481162cacc29b962beeefd540c1e6222cccfdb40e79e8d459d")
Task = dict[str, Any]
DOMAINS: dict[str, type[Environment]] = {"airline": Airline, "retail": Retail}
STOP = "###STOP###"
ENDINGS = (STOP, "###TRANSFER###", "###OUT-OF-SCOPE###")
"""With one of these the customer ends the conversation; tau2's guidelines for the customer name them."""


def tasks(domain: str, split: str) -> list[Task]:
    """The tasks of a split, "train" or "test", as JSON.

    A task has the customer's `scenario` (its instructions), and of that the `reason` and `details`; the tool calls of
    the reference run (`actions`), what the customer has to be told (`say`), and what is graded (`basis`).

    Raises:
        HubError: the package cannot be downloaded. DatasetError: a task cannot be graded here.
    """
    chosen = set(json.loads(_read(f"domains/{domain}/split_tasks.json"))[split])
    return [_task(domain, task) for task in json.loads(_read(f"domains/{domain}/tasks.json")) if task["id"] in chosen]


def open_environment(task: Mapping[str, Any]) -> Environment:
    """The policy and the tools of a task's domain, on a database that only this rollout changes."""
    domain = task["domain"]
    return DOMAINS[domain](_read(f"domains/{domain}/policy.txt"), database(domain))


@functools.cache
def database(domain: str) -> dict[str, dict[str, Any]]:
    """A domain's tables before any conversation. All rollouts share them, and none writes into them."""
    return json.loads(_read(f"domains/{domain}/db.json.gz"))


def reward(task: Mapping[str, Any], output: Mapping[str, Any]) -> float:
    """1 if the database ends as after the reference run and all that is required was said, else 0: tau2's reward.

    The database is compared as a whole, so a change too many fails, too. What is required may be said in any message to
    the customer, in any case; commas in it do not count. A conversation that was cut off earns 0. Statements in plain
    language (tau2's NL_ASSERTION) need a model as a judge and are not graded.
    """
    if not output["ended"]:
        return 0.0
    told = "\n".join(turn["text"] for turn in output["conversation"] if turn["role"] == "assistant")
    told = told.lower().replace(",", "")
    grades = {
        "DB": output["changes"] == expected_changes(task),
        "COMMUNICATE": all(info.lower() in told for info in task["say"]),
    }
    return float(all(grades[name] for name in task["basis"]))


def expected_changes(task: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the reference run changes in the database, as `Environment.changes` gives it."""
    return _reference(task["domain"], json.dumps(task["actions"]))[0]


def reference_length(task: Mapping[str, Any]) -> int:
    """The characters of the reference run's calls and results, and of what the customer tells: how long it is."""
    calls = json.dumps(task["actions"])
    return len(task["details"]) + len(calls) + _reference(task["domain"], calls)[1]


@functools.cache
def _reference(domain: str, actions: str) -> tuple[dict[str, dict[str, Any]], int]:
    """What tool calls, as JSON, change in the database, and the characters of their results."""
    desk = open_environment({"domain": domain})
    results = desk.play(json.loads(actions))
    return desk.changes(), sum(map(len, results))


def _task(domain: str, task: Mapping[str, Any]) -> Task:
    instructions, criteria = task["user_scenario"]["instructions"], task["evaluation_criteria"]
    guidelines, reason = _read("user_simulator/simulation_guidelines.txt"), instructions["reason_for_call"].strip()
    parts = (instructions.get(part) or "" for part in ("known_info", "unknown_info", "task_instructions"))
    details = "\n".join(part.strip() for part in parts if part.strip(". \n"))
    basis = set(criteria.get("reward_basis") or ("DB", "COMMUNICATE")) - {"NL_ASSERTION"}
    if not basis or not basis <= {"DB", "COMMUNICATE"}:
        raise DatasetError(f"the reward of this task needs {sorted(basis)}", domain=domain, task=task["id"])
    return {
        "domain": domain,
        "id": task["id"],
        "scenario": f"{guidelines}\n<scenario>\n{reason}\n{details}\n</scenario>",
        "reason": reason,
        "details": details,
        "actions": [{"name": action["name"], "arguments": action["arguments"]} for action in criteria["actions"] or []],
        "say": list(criteria.get("communicate_info") or []),
        "basis": sorted(basis),
    }


@functools.cache
def _read(name: str) -> str:
    with zipfile.ZipFile(pypi_wheel(*PACKAGE)) as wheel:
        data = wheel.read(f"inspect_evals/tau2/data/{name}")
    return (gzip.decompress(data) if name.endswith(".gz") else data).decode("utf-8")
