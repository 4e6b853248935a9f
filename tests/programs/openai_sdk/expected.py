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
        return Reply("Let me look.", (("check_stock", {"product": "lamp"}),))
    if len(results) == 1:
        return Reply(tools=(("check_stock", {"product": "desk"}),))
    return Reply(f"We found {' and '.join(results)}.")


def responses_conversation(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if who == "tool":
        return Reply(f"The stars say {text}")
    if "rhyme" in text:
        return Reply("An otter in the water.")
    return Reply(tools=(("get_horoscope", {"sign": "Aquarius"}),))


def slogans(body: dict[str, Any]) -> Reply:
    return Reply(f"Slogan: {last_said(body)[1]}")


def raw_and_parsed(body: dict[str, Any]) -> Reply:
    text = last_said(body)[1]
    if "response_format" in body:
        return Reply('{"name": "Science fair", "day": "Friday", "guests": ["Bob", "Alice"]}')
    return Reply("Alice et Bob viennent." if "French" in text else "A fair on Friday.")


def side_by_side(body: dict[str, Any]) -> Reply:
    text = last_said(body)[1]
    return Reply(f"Short: {text}" if "input" in body else f"{text} is a film.")


PROGRAMS = {
    "tool_loop": Expected(
        script=tool_loop, agents=ROOT, trains="tool_loop", tools=("check_stock", "check_stock"), calls=3,
    ),
    "responses_conversation": Expected(
        script=responses_conversation, agents=ROOT, trains="responses_conversation", tools=("get_horoscope",), calls=3,
    ),
    "streamed_and_sampled": Expected(script=slogans, agents=ROOT, trains="streamed_and_sampled", calls=4),
    "raw_and_parsed": Expected(script=raw_and_parsed, agents=ROOT, trains="raw_and_parsed", calls=3),
    "side_by_side": Expected(script=side_by_side, agents=ROOT, trains="side_by_side", calls=6),
}  # fmt: skip
