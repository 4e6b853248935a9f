"""Scripted models: `agent_b`, which stays as it is, and two that stand behind `agent_a`: one that knows, a beginner."""

from __future__ import annotations

import random
import re
from typing import Any

from agl.testing.provider import Reply, last_said
from examples.massgen.tasks import right_answer


def agent_b(body: dict[str, Any]) -> Reply:
    """Counts for about half of the questions and is right, else guesses and is wrong; it says which it did.

    Its vote is for a right answer: its own if that is right, or if none is.
    """
    text, tool = last_said(body)[1], _tool(body)
    if tool == "new_answer":
        right = right_answer(text)
        rng = random.Random(f"b {text}")
        if rng.random() < 0.5:
            return Reply(tools=(("new_answer", {"content": f"{right}, counted"}),))
        others = [a for a in re.findall(r"\d+", text) if a != right]
        return Reply(tools=(("new_answer", {"content": f"{rng.choice(others)}, guessed"}),))
    if tool == "vote":
        right = [label for label, answer in _answers(text).items() if answer.split(",")[0] == right_answer(text)]
        return Reply(tools=(("vote", {"agent_id": "agent2" if right != ["agent1"] else "agent1"}),))
    return Reply(right_answer(text))


def oracle(body: dict[str, Any]) -> Reply:
    """`agent_a` as it should be: it answers right, and votes for the other unless the other guessed."""
    text, tool = last_said(body)[1], _tool(body)
    if _agent(body) != "agent_a" or tool is None:
        return agent_b(body)
    if tool == "new_answer":
        return Reply(tools=(("new_answer", {"content": right_answer(text)}),))
    guessed = _answers(text).get("agent2", "").endswith("guessed")
    return Reply(tools=(("vote", {"agent_id": "agent1" if guessed else "agent2"}),))


def beginner(body: dict[str, Any]) -> Reply:
    """`agent_a` as it begins: often a wrong item; no vote, a vote for nobody, or a vote at random."""
    text, tool = last_said(body)[1], _tool(body)
    if _agent(body) != "agent_a" or tool is None:
        return agent_b(body)
    rng = random.Random(f"a {text}")
    if tool == "new_answer":
        amounts = re.findall(r"\d+", text)
        answer = right_answer(text) if rng.random() < 0.7 else rng.choice(amounts)
        return Reply(tools=(("new_answer", {"content": answer}),))
    chosen = rng.choice(["agent1", "agent2"] * 3 + ["agent3", "", "", "agent3"])
    return Reply(tools=(("vote", {"agent_id": chosen}),)) if chosen else Reply("I do not know.")


def null(body: dict[str, Any]) -> Reply:
    """`agent_a` that says nothing."""
    return Reply("") if _agent(body) == "agent_a" else agent_b(body)


def _agent(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"]).removeprefix("You are ").rstrip(".")


def _tool(body: dict[str, Any]) -> str | None:
    tools = body.get("tools")
    return tools[0]["function"]["name"] if tools else None


def _answers(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(agent\d): (.*)$", text, re.MULTILINE))
