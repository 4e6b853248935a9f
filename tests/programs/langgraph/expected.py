"""What is known of the programs of this folder."""

from __future__ import annotations

from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said


def system_of(body: dict[str, Any]) -> str:
    return read.body(body)[0].text


def tools_of(body: dict[str, Any]) -> set[str]:
    return {tool["function"]["name"] for tool in read.tools(body.get("tools"))}


def supervisor(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    system = system_of(body)
    if "look facts up" in system:
        return Reply(text) if who == "tool" else Reply(tools=(("look_up", {"topic": "Everest"}),))
    if "one sentence" in system:
        return Reply("Everest is 8,849 metres high.")
    said = [m.text.partition(":")[0] for m in read.body(body)]
    next_one = "FINISH" if "writer" in said else "writer" if "researcher" in said else "researcher"
    return Reply(f'{{"next": "{next_one}"}}')


def swarm(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "flights" in system_of(body):
        if who == "user":
            return Reply(tools=(("book_flight", {"origin": "Bonn", "destination": "Rome"}),))
        return Reply(tools=(("transfer_to_hotel_assistant", {}),))
    if text.startswith("Booked"):
        return Reply(f"Done. {text}")
    return Reply(tools=(("book_hotel", {"city": "Pisa" if "Pisa" in text else "Rome"}),))


def functional_api(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    match system_of(body).split()[0]:
        case "List":
            return Reply("dances, honey")
        case "Write":
            return Reply(f"All about {text}.")
        case _:
            return Reply("Bees")


def map_reduce(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    if "three examples" in text:
        return Reply('{"subjects": ["cats", "dogs", "newts"]}')
    if "BestJoke" in tools_of(body):
        return Reply(tools=(("BestJoke", {"id": 1}),))
    return Reply(f"{text.split()[-1]} walk into a bar.")


def plan_and_execute(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    system = system_of(body)
    if "step by step" in system:
        return Reply('{"steps": ["France", "Spain"]}' if "Spain" in text else '{"steps": ["France"]}')
    if "Do the step" in system:
        return Reply(f"{text} people") if who == "tool" else Reply(tools=(("population", {"country": text}),))
    done = text.partition("Done: ")[2]
    if "Spain?" in text and "Spain" not in done:
        return Reply('{"steps": ["Spain"]}')
    return Reply('{"response": "In France."}' if "Spain?" in text else '{"response": "68 million."}')


def approval(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if who == "user":
        return Reply(tools=(("find_hotels", {"city": "Bonn"}),))
    return Reply(tools=(("book_hotel", {"hotel": "Hotel Bonn"}),)) if 'Inn"' in text else Reply(f"Well: {text}")


def streaming_teams(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    match system_of(body):
        case "You search.":
            return Reply(f"Found {text}") if who == "tool" else Reply(tools=(("search", {"query": "bees"}),))
        case "You check facts.":
            return Reply("That is true.")
        case _:
            return Reply("Bees dance to talk.")


def concurrent_branches(body: dict[str, Any]) -> Reply:
    system, (_, text) = system_of(body), last_said(body)
    if system.startswith("Sum"):
        return Reply("A bad one." if "eval" in text else "A good one.")
    return Reply(f"looked at {text}")


def agents_as_tools(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    match system_of(body):
        case "You are a mathematician.":
            return Reply(f"It is {text}.") if who == "tool" else Reply(tools=(("add", {"a": 2, "b": 3}),))
        case "You are a poet.":
            return Reply("O sum!")
        case "Translate to French.":
            return Reply("Ô cinq !")
    if who == "user":
        return Reply(tools=(("ask_math_expert", {"question": "2 + 3?"}), ("ask_poet", {"question": "A line!"})))
    translated = sum(m.role == "assistant" for m in read.body(body)) > 1
    return Reply(f"Voilà: {text}") if translated else Reply(tools=(("to_french", {"text": "O five!"}),))


def same_name(body: dict[str, Any]) -> Reply:
    words = sum(m.role == "assistant" for m in read.body(body))
    return Reply(f"{system_of(body)} {words} were before.")


PROGRAMS = {
    "supervisor_by_hand": Expected(
        script=supervisor, agents=("researcher", "supervisor", "writer"), trains="researcher", tools=("look_up",),
        calls=6,
    ),
    "swarm": Expected(
        script=swarm, agents=("flight_assistant", "hotel_assistant"), trains="hotel_assistant",
        tools=("book_flight", "transfer_to_hotel_assistant", "book_hotel", "book_hotel"), calls=6,
    ),
    "functional_api": Expected(
        script=functional_api, agents=("write_outline", "write_paragraph", "headline"), trains="write_paragraph",
        calls=4,
    ),
    "map_reduce": Expected(
        script=map_reduce, agents=("generate_topics", "generate_joke", "best_joke"), trains="generate_joke", calls=5,
    ),
    "plan_and_execute": Expected(
        script=plan_and_execute, agents=("planner", "agent", "replan"), trains="agent",
        tools=("population",) * 3, calls=11,
    ),
    "approval": Expected(
        script=approval, agents=("travel_agent",), trains="travel_agent",
        tools=("find_hotels", "book_hotel", "book_hotel") * 3, calls=9,
    ),
    "streaming_teams": Expected(
        script=streaming_teams, agents=("searcher", "fact_checker", "author"), trains="author", tools=("search",),
        calls=4,
    ),
    "concurrent_branches": Expected(
        script=concurrent_branches, agents=("security_reviewer", "speed_reviewer", "style_reviewer", "judge"),
        trains="judge", calls=8,
    ),
    "agents_as_tools": Expected(
        script=agents_as_tools, agents=("supervisor", "math_expert", "poet", "translator"), trains="translator",
        tools=("ask_math_expert", "ask_poet", "add", "to_french"), calls=7,
    ),
    "same_name": Expected(script=same_name, agents=("assistant", "editor"), trains="editor", calls=4),
}  # fmt: skip
