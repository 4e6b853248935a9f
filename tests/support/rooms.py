"""A room selector for `APO`, in the shape of Agent Lightning 0.3's example: a prompt template, one tool, one reward.

The model behind HTTP calls the tool, then chooses among the rooms by the criteria that its prompt names. The reward is
exact: whether the room is the one that all criteria together choose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

import agl.compat as agl
from agl.testing.provider import Provider, Reply, serve

BASELINE = "Find a room at {time} for {attendees} people. They need: {needs}."
ROOMS: list[dict[str, Any]] = [
    {"id": "Birch", "seats": 4, "has": ["screen"], "metres": 40, "taken": ["10"]},
    {"id": "Cedar", "seats": 12, "has": ["screen", "phone"], "metres": 5, "taken": []},
    {"id": "Elm", "seats": 6, "has": ["screen", "phone"], "metres": 60, "taken": ["9"]},
    {"id": "Fir", "seats": 6, "has": ["board"], "metres": 20, "taken": []},
    {"id": "Larch", "seats": 8, "has": ["board", "screen"], "metres": 10, "taken": ["11"]},
]
CRITERIA = {
    "free": lambda room, task: task["time"] not in room["taken"],
    "large enough": lambda room, task: room["seats"] >= task["attendees"],
    "equipped": lambda room, task: set(task["needs"]) <= set(room["has"]),
}
TOOL = {"type": "function", "function": {"name": "list_rooms", "parameters": {"type": "object", "properties": {}}}}


def choose(task: dict[str, Any], criteria: list[str]) -> str:
    """The smallest room that meets the criteria; without the criterion on seats, the nearest one."""
    rooms = [room for room in ROOMS if all(CRITERIA[c](room, task) for c in criteria)]
    key = "seats" if "large enough" in criteria else "metres"
    return min(rooms, key=lambda room: room[key])["id"] if rooms else "none"


def tasks() -> list[dict[str, Any]]:
    inputs = [
        {"time": time, "attendees": attendees, "needs": needs}
        for time in ("9", "10", "11")
        for attendees in (3, 5, 7)
        for needs in (["screen"], ["board"], ["screen", "phone"])
    ]
    return [
        {"id": f"r{i}", "task_input": x, "expected_choice": choose(x, list(CRITERIA))} for i, x in enumerate(inputs)
    ]


@contextmanager
def room_provider() -> Iterator[Provider]:
    """The models: one that chooses rooms, one that criticises, one that rewrites."""

    def script(body: dict[str, Any]) -> Reply:
        text = str(body["messages"][-1]["content"])
        if body["model"] == "critic":
            met = re.search(r"```\n(.*?)\n```", text, re.DOTALL)
            missing = [c for c in CRITERIA if met is not None and c not in met.group(1)]
            return Reply(f"It has to ask for a room that is {missing[0]}." if missing else "Nothing is missing.")
        if body["model"] == "editor":
            before = re.search(r"```\n(.*?)\n```", text, re.DOTALL)
            asked = re.search(r"room that is ([a-z ]+)\.", text)
            assert before is not None
            return Reply(f"```\n{before.group(1)} Be sure that it is {asked.group(1) if asked else 'good'}.\n```")
        user = next(m["content"] for m in body["messages"] if m["role"] == "user")
        if body["messages"][-1]["role"] != "tool":
            return Reply(None, tools=(("list_rooms", {}),))
        found = re.search(r"at (\w+) for (\d+) people. They need: ([^.]*)", user)
        assert found is not None
        task = {"time": found[1], "attendees": int(found[2]), "needs": found[3].split(", ")}
        return Reply(f"final_choice: {choose(task, [c for c in CRITERIA if c in user])}")

    with serve(script) as provider:
        yield provider


def selector(url: str) -> Any:
    client = OpenAI(base_url=url, api_key="k", max_retries=0)

    @agl.rollout
    def room_selector(task: dict[str, Any], prompt_template: agl.PromptTemplate) -> float:
        values = {**task["task_input"], "needs": ", ".join(task["task_input"]["needs"])}
        messages: list[Any] = [
            {"role": "system", "content": "You schedule meetings."},
            {"role": "user", "content": prompt_template.format(**values)},
        ]
        tools: Any = [TOOL]
        asked = client.chat.completions.create(model="clerk", messages=messages, tools=tools).choices[0].message
        for call in asked.tool_calls or ():
            result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps(ROOMS)}
            messages += [asked.model_dump(exclude_none=True), result]
        answer = client.chat.completions.create(model="clerk", messages=messages).choices[0].message.content or ""
        return float(answer.endswith(f": {task['expected_choice']}"))

    return room_selector
