"""Models that stand for a provider's: one that follows what its prompt says, and one that rewrites prompts."""

from __future__ import annotations

import re
from typing import Any

from agl.testing.provider import Reply

RULES = {
    "money_goes_to_billing": "A ticket that asks for money is billing.",
    "a_team_is_urgent": "What stops a whole team is urgent.",
    "names_the_ticket": "Name the ticket's number.",
    "promises_no_day": "Promise no day.",
}
"""Reward -> the sentence that helps, and which the obedient model understands."""


def models(body: dict[str, Any]) -> Reply:
    """Both are at one server, told apart by the model's name."""
    texts = [str(message["content"]) for message in body["messages"]]
    return Reply(rewrite(texts[-1]) if body["model"] == "rewriter" else obey(texts[0], texts[-1]))


def obey(prompt: str, ticket: str) -> str:
    """Does what the prompt says, and where it says nothing, what is not wanted."""
    told = {name for name, sentence in RULES.items() if sentence in prompt}
    if prompt.startswith("Sort"):
        technical = re.search("page|export|app|login", ticket)
        money = "money_goes_to_billing" in told and "money" in ticket
        urgent = "a_team_is_urgent" in told and "team" in ticket
        return f"{'technical' if technical and not money else 'billing'} {'urgent' if urgent else 'normal'}"
    number = re.findall(r"\d+", ticket)[0] if "names_the_ticket" in told else "your ticket"
    return f"We look at {number}{'' if 'promises_no_day' in told else ' and answer by tomorrow'}."


def rewrite(request: str) -> str:
    """Adds the sentence of a rule that the feedback shows as broken and that the prompt's agent can keep."""
    found = re.search(r"```\n(.*?)\n```", request, re.DOTALL)
    prompt = found[1] if found else ""
    broken = re.findall(r"^(\w+) = 0\b", request, re.MULTILINE)
    mine = list(RULES)[:2] if prompt.startswith("Sort") else list(RULES)[2:]
    wanted = [RULES[name] for name in mine if name in broken and RULES[name] not in prompt]
    return f"```\n{prompt} {wanted[0]}\n```" if wanted else f"```\n{prompt}\n```"
