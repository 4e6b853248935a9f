"""What is known of the programs of this folder."""

from __future__ import annotations

from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said


def supervisor(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    system = read.body(body)[0].text
    if "look facts up" in system:
        return Reply(text) if who == "tool" else Reply(tools=(("look_up", {"topic": "Everest"}),))
    if "one sentence" in system:
        return Reply("Everest is 8,849 metres high.")
    said = [m.text.partition(":")[0] for m in read.body(body)]
    next_one = "FINISH" if "writer" in said else "writer" if "researcher" in said else "researcher"
    return Reply(f'{{"next": "{next_one}"}}')


PROGRAMS = {
    "supervisor_by_hand": Expected(
        script=supervisor, agents=("researcher", "supervisor", "writer"), trains="researcher", tools=("look_up",),
        calls=6,
    ),
}  # fmt: skip
