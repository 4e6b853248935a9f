"""Scripted models for tau2, behind real HTTP: the customer, an assistant that is always right, and a useless one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agl.testing.provider import Reply, Script, last_said
from examples.smollm2.tau2 import STOP, Task

READS = ("calculate", "find_", "get_", "list_", "search_", "transfer_")
"""How the tools begin that change nothing, and so need no yes."""
TRANSFER = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON."
"""What both policies have the assistant say after a transfer."""


def customer(tasks: Sequence[Task]) -> Script:
    """Reads its scenario aloud: why it calls, the details when asked for, then yes to any question; no question, no
    further message."""
    by_scenario = {task["scenario"]: task for task in tasks}

    def script(body: dict[str, Any]) -> Reply:
        task = by_scenario[system(body)]
        spoken = sum(message["role"] == "assistant" for message in body["messages"])
        if spoken == 0:
            return Reply(task["reason"])
        if "?" not in last_said(body)[1]:
            return Reply(STOP)
        return Reply(task["details"] if spoken == 1 else "Yes.")

    return script


def oracle(tasks: Sequence[Task]) -> Script:
    """An assistant that asks for the details, makes the calls of the reference run, the first change after a yes, and
    says what has to be said. It recognises a task by what the scripted customer says."""
    by_story = {(task["reason"], task["details"]): task for task in tasks}

    def script(body: dict[str, Any]) -> Reply:
        heard = [text(message) for message in body["messages"] if message["role"] == "user"]
        if len(heard) == 1:
            return Reply("Who are you, and what exactly shall I do?")
        task = by_story[heard[0], heard[1]]
        made = sum(message["role"] == "tool" for message in body["messages"])
        if made == len(task["actions"]):
            transferred = any(action["name"].startswith("transfer_") for action in task["actions"])
            return Reply(" ".join([TRANSFER if transferred else "That is all.", *task["say"]]))
        action = task["actions"][made]
        if len(heard) == 2 and changes(action):
            planned = [_described(action) for action in task["actions"][made:] if changes(action)]
            return Reply(f"I am going to {'; '.join(planned)}. Shall I?")
        return Reply(tools=((action["name"], action["arguments"]),))

    return script


def null(body: dict[str, Any]) -> Reply:
    """An assistant that does nothing and says nothing of use."""
    return Reply("I see.")


def both(tasks: Sequence[Task], assistant: Script) -> Script:
    """The scripted customer and an assistant behind the same URL."""
    scenarios, user = {task["scenario"] for task in tasks}, customer(tasks)
    return lambda body: (user if system(body) in scenarios else assistant)(body)


def changes(action: Mapping[str, Any]) -> bool:
    """Whether a call of a reference run may change the database."""
    return not action["name"].startswith(READS)


def _described(action: Mapping[str, Any]) -> str:
    """A call in words: "cancel reservation EHGLP3"."""
    id = next((value for name, value in action["arguments"].items() if name.endswith("_id")), "")
    return f"{action['name'].replace('_', ' ')} {id}"


def system(body: Mapping[str, Any]) -> str:
    """The instructions of the agent that sent a request."""
    return text(body["messages"][0])


def text(message: Mapping[str, Any]) -> str:
    """A message's text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
