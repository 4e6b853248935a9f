"""Scripted models behind real HTTP: the customer, an assistant that keeps every rule, and one that mostly errs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from agl.testing.provider import Reply, Script, last_said
from examples.customer_service.agent import GREETING, STOP
from examples.customer_service.tasks import ALLOWED, CITIES, FIRST_NAMES, ITEMS, LAST_NAMES

USER_ERRORS = 0.06
"""The share of tasks in which the scripted customer breaks its scenario."""


# -- the customer -----------------------------------------------------------------------------------------------------


def customer(body: dict[str, Any]) -> Reply:
    """A state machine: its state is the conversation, its choices are seeded by the scenario."""
    scenario = _text(body["messages"][0])
    wish, order = re.search(r'You want to (\w+ order "(\w+)".*)\.', scenario).groups()  # type: ignore[union-attr]
    email, when = re.search(r"email is ([\w.]+); tell it (.*)\.", scenario).groups()  # type: ignore[union-attr]
    answer = re.search(r"change, say (\w+)", scenario)[1]  # type: ignore[index]
    rng = random.Random(scenario)
    opening = rng.choice(("I want to {}.", "Please {}.", "Can you {}?")).format(wish)
    error = rng.choice(("made up", "wrong answer", "gave up")) if rng.random() < USER_ERRORS else None
    if error == "made up":
        opening = opening.replace(order, rng.choice([item for item in ITEMS if item != order]))
    _, heard = last_said(body)
    if heard == GREETING:
        return Reply(f'{opening} I am "{email}".' if when == "at once" else opening)
    if "?" not in heard:
        return Reply(STOP)
    if error == "gave up":
        return Reply(STOP)
    if "email" in heard.lower():
        return Reply(f'I am "{email}".')
    if error == "wrong answer":
        answer = "no" if answer == "yes" else "yes"
    return Reply(f"{answer}.")


# -- the assistant ----------------------------------------------------------------------------------------------------

Slip = Callable[[str], bool]
"""mistake -> whether it is made now."""

MISTAKES = {
    "skips the email": 0.1,
    "does not look the caller up": 0.1,
    "serves a stranger": 0.6,
    "wrong value": 0.04,
    "ignores the status": 0.5,
    "wrong refund": 0.3,
    "does not ask": 0.3,
    "ignores a no": 0.5,
    "does nothing": 0.2,
    "transfers": 0.08,
}
"""What the beginner gets wrong, with the probability each time that it could."""
FEW_MISTAKES = {"wrong refund": 0.75, "ignores the status": 0.6, "ignores a no": 0.3}
"""Those of the short form: choices between things that the beginner always writes in the right form."""


def oracle(body: dict[str, Any]) -> Reply:
    """Keeps the policy; knows what the conversation says and nothing else."""
    return _next(body, lambda mistake: False, random.Random(0))


def beginner(body: dict[str, Any]) -> Reply:
    """Writes every call and answer in the right form, and makes each of `MISTAKES`, seeded by the conversation."""
    return _errs(body, MISTAKES)


def short_beginner(body: dict[str, Any]) -> Reply:
    """The same with `FEW_MISTAKES`."""
    return _errs(body, FEW_MISTAKES)


def null(body: dict[str, Any]) -> Reply:
    """Says something, does nothing."""
    return Reply("Goodbye.")


def replays(actions: list[dict[str, Any]], say: list[str]) -> Script:
    """An assistant that makes these calls at once and then tells all of `say`: the gold run of any domain."""

    def script(body: dict[str, Any]) -> Reply:
        made = sum(message["role"] == "tool" for message in body["messages"])
        if made < len(actions):
            return Reply(tools=((actions[made]["name"], actions[made]["arguments"]),))
        return Reply("Done. " + ", ".join(say))

    return script


def _errs(body: dict[str, Any], mistakes: Mapping[str, float]) -> Reply:
    rng = random.Random(json.dumps([_text(message) for message in body["messages"]]))
    return _next(body, lambda mistake: rng.random() < mistakes.get(mistake, 0), rng)


def _next(body: dict[str, Any], slips: Slip, rng: random.Random) -> Reply:
    messages = body["messages"]
    heard = " ".join(_text(m) for m in messages if m["role"] == "user")
    asked = [_text(m) for m in messages if m["role"] == "assistant" and "?" in _text(m)]
    results = _results(messages)

    def call(tool: str, **arguments: str) -> Reply:
        return Reply(
            tools=(
                (
                    tool,
                    {name: _other(value, rng) if slips("wrong value") else value for name, value in arguments.items()},
                ),
            )
        )

    kind = next(kind for kind in ALLOWED if kind in heard)
    order = re.search(r'order "(\w+)"', heard)[1]  # type: ignore[index]
    email = re.search(r'I am "(\w+\.\w+)"', heard)
    city = next((city for city in CITIES if city in heard), None)
    if "transfer" in results:
        return Reply("A colleague takes over.")
    if not results and slips("transfers"):
        return call("transfer")
    if email is None and not slips("skips the email"):
        return Reply("Your email?")
    if not results and email is not None and not slips("does not look the caller up"):
        return call("find_customer", email=email[1])
    if results.get("find_customer") == "unknown" and "get_order" not in results and not slips("serves a stranger"):
        return call("transfer")
    if "get_order" not in results:
        return call("get_order", order=order)
    if f"{kind}_order" in results:
        return Reply("Done.")
    if results["get_order"] == "unknown":
        return Reply("There is no such order.")
    price, terms, status = results["get_order"].split(", ")
    proposed = [text for text in asked if "email" not in text]
    refund = "voucher" if terms == "sale" else "card"
    if proposed:
        refund = "voucher" if "voucher" in proposed[-1] else "card"
        said_yes = last_said(body)[1].startswith("yes")
        if not said_yes and not slips("ignores a no"):
            return Reply("Nothing changed.")
        if slips("does nothing"):
            return Reply("Done.")
    else:
        if status not in ALLOWED[kind] and not slips("ignores the status"):
            return Reply(f"Sorry, it is {status}.")
        if slips("wrong refund"):
            refund = "card" if refund == "voucher" else "voucher"
        if not slips("does not ask"):
            return Reply(f'Move "{order}" to "{city}"?' if city else f'{kind.title()} "{order}", {price} as {refund}?')
    if city:
        return call("move_order", order=order, city=city)
    return call(f"{kind}_order", order=order, refund=refund)


def _other(value: str, rng: random.Random) -> str:
    """Another value of the same kind."""
    if "." in value:
        return f"{rng.choice(FIRST_NAMES)}.{rng.choice(LAST_NAMES)}"
    return rng.choice(next((words for words in (ITEMS, CITIES) if value in words), (value,)))


def _results(messages: list[dict[str, Any]]) -> dict[str, str]:
    """Tool -> what it returned last."""
    names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls") or ()}
    return {names[m["tool_call_id"]]: _text(m) for m in messages if m["role"] == "tool"}


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
