"""What is known of the programs of this folder."""

from __future__ import annotations

from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said

ROOT = "own_tracing"
"""The program that the harness starts."""


def system_of(body: dict[str, Any]) -> str:
    return read.body(body)[0].text


def answers_in(body: dict[str, Any]) -> int:
    return sum(m.role == "assistant" for m in read.body(body))


def sub_agents(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    match system_of(body):
        case "You keep the calendar.":
            return (
                Reply(f"Yes: {text}.")
                if who == "tool"
                else Reply(tools=(("create_event", {"title": "Review", "start": "14:00"}),))
            )
        case "You write email.":
            return (
                Reply("It is sent.")
                if who == "tool"
                else Reply(tools=(("send_email", {"to": ["design@example.com"], "subject": "Review"}),))
            )
    if who == "tool":
        return Reply("Both are done.")
    return Reply(tools=(("schedule_event", {"request": text}), ("manage_email", {"request": text})))


def structured_output(body: dict[str, Any]) -> Reply:
    if "contacts" in system_of(body):
        return Reply('{"name": "Ada", "email": "ada@example.com"}')
    if answers_in(body) == 0:
        return Reply(tools=(("find_product", {"words": "x1"}),))
    rating = 10 if answers_in(body) == 1 else 5
    return Reply(tools=(("ProductReview", {"product": "Lamp X1", "rating": rating, "sentiment": "positive"}),))


def middleware(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if body["model"] == "gpt-4.1-nano":
        return Reply("It was about insects.")
    if who == "user":
        return Reply(tools=(("search", {"query": text}), ("search", {"query": f"more of {text}"})))
    return Reply(f"I know of {text.partition(':')[0]}")


def chains(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    if "broken" in body["model"]:
        return Reply(status=500)
    if "JSON" in text:
        return Reply('{"legs": 6}' if "ants" in text else '```json\n{"legs": 8}\n```')
    return Reply(f"So, {text}")


def events(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if text.startswith("Sum up"):
        return Reply(f"in short {text.split()[-1]}")
    if who == "user":
        return Reply(tools=(("read_page", {"url": "a.com"}), ("read_page", {"url": "b.com"})))
    return Reply("They say little.")


def tools_by_hand(body: dict[str, Any]) -> Reply:
    match answers_in(body):
        case 0:
            return Reply(tools=(("price", {"item": "lamp"}), ("price", {"item": "desk"})))
        case 1:
            return Reply("So:", tools=(("multiply", {"a": 3, "b": 30}),))
        case 2:
            return Reply(tools=(("order", {"item": "lamp", "count": 3}),))
        case _:
            return Reply(f"90, but {last_said(body)[1]}.")


def anthropic_agent(body: dict[str, Any]) -> Reply:
    if last_said(body)[0] == "user":
        return Reply("Let me see.", tools=(("borrow", {"book": "Emma"}), ("borrow", {"book": "Persuasion"})))
    return Reply("You have one of them.")


def responses_api(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if body["model"] == "gpt-4.1-nano":
        return Reply("Sonne" if body.get("previous_response_id") else "Es ist sonnig.")
    if who == "tool":
        return Reply(f"Well. {text}", reasoning="Not much to say.")
    cities = [city for city in ("Paris", "Rome", "Atlantis") if city in text]
    return Reply(reasoning="I look it up.", tools=tuple(("weather", {"city": city}) for city in cities))


PROGRAMS = {
    "sub_agents": Expected(
        script=sub_agents, agents=("assistant", "calendar_agent", "email_agent"), trains="email_agent",
        tools=("schedule_event", "manage_email", "create_event", "send_email"), calls=6,
    ),
    "structured_output": Expected(
        script=structured_output, agents=("review_reader", "contact_reader"), trains="review_reader",
        # The call that is answered "Please fix your mistakes" counts as one that failed.
        tools=("find_product", "ProductReview"), calls=4,
    ),
    "middleware": Expected(
        # Half of them are refused by the limit: calls that failed.
        script=middleware, agents=("searcher", "searcher-summary"), trains="searcher", tools=("search",) * 6, calls=10,
    ),
    "chains": Expected(script=chains, agents=(ROOT,), trains="chains", calls=10, failed=1),
    "events": Expected(
        script=events, agents=("reader",), trains="reader", tools=("read_page", "read_page"), calls=4,
    ),
    "tools_by_hand": Expected(
        script=tools_by_hand, agents=(ROOT,), trains="tools_by_hand", tools=("price", "price", "multiply", "order"),
        calls=4,
    ),
    "anthropic_agent": Expected(
        script=anthropic_agent, agents=("librarian",), trains="librarian", tools=("borrow", "borrow"), calls=2,
    ),
    "responses_api": Expected(
        script=responses_api, agents=("forecaster", ROOT), trains="forecaster", tools=("weather",) * 3, calls=5,
    ),
}  # fmt: skip
