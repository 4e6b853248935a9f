"""What is known of the programs of this folder: bare clients, whose calls belong to the program as a whole."""

from __future__ import annotations

from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said

ROOT = ("own_tracing",)
"""The program that `agl run` starts."""


def tool_loop(body: dict[str, Any]) -> Reply:
    results = [r.text for m in read.body(body) for r in m.tool_results]
    if not results:
        return Reply("I will look.", (("get_weather", {"city": "Oslo"}), ("get_time", {"city": "Oslo"})))
    return Reply(f"I found {' and '.join(results)}.")


def streamed(body: dict[str, Any]) -> Reply:
    if "tools" in body:
        return Reply("Saved:", (("save_verse", {"title": "Snow", "verse": "White, white, white."}),))
    return Reply("It falls and falls.")


def gathered_reviews(body: dict[str, Any]) -> Reply:
    system = read.body(body)[0].text
    if "editor" in system:
        return Reply(f"{len(last_said(body)[1].splitlines())} reviews, use math.pi.")
    return Reply(f"Fine ({system.rpartition(' ')[2]})")


def thinking(body: dict[str, Any]) -> Reply:
    messages = read.body(body)
    results = [r.text for m in messages for r in m.tool_results]
    if not results:
        return Reply("Let me work it out.", (("square_root", {"x": 1764}),), reasoning="A root is asked for.")
    if "even" in messages[-1].text:
        return Reply("It is even.", reasoning="Its last digit is 2.")
    return Reply(f"It is {results[0]}, as 42 times 42 is 1764.", reasoning="Now explain.")


def tool_runner(body: dict[str, Any]) -> Reply:
    """The runner sends what is new, and the server knows the rest."""
    new = [r.text for r in read.body(body)[-1].tool_results]
    if not new:
        return Reply("Let me see.", (("in_pantry", {"food": "eggs"}), ("in_pantry", {"food": "flour"})))
    if "0 flour" in new:
        return Reply(tools=(("buy", {"food": "flour", "amount": 2}),))
    return Reply(f"The cake is in the oven: {new[0]}.")


PROGRAMS = {
    "tool_loop": Expected(
        script=tool_loop, agents=ROOT, trains="tool_loop", tools=("get_weather", "get_time"), calls=2,
    ),
    "streamed": Expected(script=streamed, agents=ROOT, trains="streamed", calls=3),
    "gathered_reviews": Expected(script=gathered_reviews, agents=ROOT, trains="gathered_reviews", calls=4),
    "thinking": Expected(script=thinking, agents=ROOT, trains="thinking", tools=("square_root",), calls=3),
    "tool_runner": Expected(
        script=tool_runner, agents=ROOT, trains="tool_runner", tools=("in_pantry", "in_pantry", "buy"), calls=3,
    ),
}  # fmt: skip
