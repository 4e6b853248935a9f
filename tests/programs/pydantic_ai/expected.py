"""What is known of the programs of this folder."""

from __future__ import annotations

import json
from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said


def _tools(body: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in body.get("tools") or ()]


def hotel_desk(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    assert "called Seaview" in json.dumps(body["messages"][:2])
    if "yours" in text:
        return Reply(tools=(("final_result", {"room": "12", "price": 90, "remark": "Sea view"}),))
    if '"12"' in text:
        return Reply(tools=(("book", {"room": "12"}),))
    return Reply(tools=(("find_rooms", {"most": 100}),))


def asked_again(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "at most 40" in text:
        return Reply(tools=(("final_result_Message", {"user_id": 7, "text": "Tea, Ada?"}),))
    if "full name" in text:
        return Reply(tools=(("user_by_name", {"name": "Ada Lovelace"}),))
    if who == "tool":
        long = "Dear Ada, I would like to ask whether you have time for tea."
        return Reply(tools=(("final_result_Message", {"user_id": 7, "text": long}),))
    return Reply(tools=(("user_by_name", {"name": "Ada"}),))


def delegation(body: dict[str, Any]) -> Reply:
    who, _ = last_said(body)
    if "suggest_dish" in _tools(body):
        courses = ("starter", "dessert")
        return (
            Reply("Leek soup, then plum cake.")
            if who == "tool"
            else Reply(tools=tuple(("suggest_dish", {"course": course}) for course in courses))
        )
    if who != "tool":
        return Reply(tools=(("pantry", {}),))
    course = "starter" if "starter" in read.body(body)[1].text else "dessert"
    return Reply(tools=(("final_result", {"response": [f"{course} {n}" for n in (1, 2, 3)]}),))


def remembered(body: dict[str, Any]) -> Reply:
    asked = [m.text for m in read.body(body) if m.role == "user"]
    return Reply(f"Minutes, to the questions {'; '.join(asked)}")


def streamed(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "depth" in _tools(body):
        if who == "tool":
            return Reply(f"The Baltic Sea is {text} metres deep.")
        return Reply(tools=(("depth", {"sea": "Baltic"}),))
    whales = [{"name": "blue whale", "metres": 29.5}, {"name": "beluga"}]
    return Reply(tools=(("final_result", {"response": whales}),))


def step_by_step(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if who == "tool":
        return Reply("12.5 USD, or 5 CHF.", reasoning="Ten times the rates.")
    if "Which is more" in text:
        return Reply("The same.")
    rates = tuple(("rate", {"source": "EUR", "target": target}) for target in ("USD", "CHF"))
    return Reply(tools=rates, reasoning="I need two rates.")


def review_graph(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    if text.startswith("To change"):
        return Reply(f"{text}.")
    topic = next(word for word in ("grammar", "tone", "length") if f"<topic>{word}<" in text)
    return Reply(tools=(("final_result", {"topic": topic, "fine": topic == "length"}),))


PROGRAMS = {
    "hotel_desk": Expected(
        script=hotel_desk, agents=("desk",), trains="desk", tools=("find_rooms", "book"), calls=3,
    ),
    "asked_again": Expected(
        script=asked_again, agents=("secretary",), trains="secretary",
        # An answer that the validator refuses is a failed call, one that it takes is no call of a tool.
        tools=("user_by_name", "user_by_name", "final_result_Message"), calls=4,
    ),
    "delegation": Expected(
        script=delegation, agents=("menu_agent", "dish_agent"), trains="dish_agent",
        tools=("suggest_dish", "suggest_dish", "pantry", "pantry"), calls=6,
    ),
    "remembered": Expected(script=remembered, agents=("chef",), trains="chef", calls=3),
    "streamed": Expected(
        script=streamed, agents=("narrator", "biologist"), trains="narrator", tools=("depth",), calls=3,
    ),
    "step_by_step": Expected(
        script=step_by_step, agents=("banker",), trains="banker", tools=("rate", "rate"), calls=3,
    ),
    "review_graph": Expected(
        script=review_graph, agents=("reviewer", "editor"), trains="reviewer", calls=4,
    ),
}  # fmt: skip
