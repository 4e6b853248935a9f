"""What is known of the programs of this folder."""

from __future__ import annotations

from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said

CODE = "python_interpreter"


def _code(thought: str, *lines: str) -> Reply:
    return Reply("\n".join([f"Thought: {thought}", "<code>", *lines, "</code>"]))


def _tasks(body: dict[str, Any]) -> list[str]:
    """What the user said; an agent's first task is the first one, observations are among them."""
    return [m.text for m in read.body(body) if m.role == "user"]


def code_agent(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    if "KeyError" in text:
        return _code("It wants the singular.", "found = [price(fruit) for fruit in basket]", "print(found)")
    if "[3, 5, 10]" in text:
        return _code("Now the mean.", "import statistics", "final_answer(statistics.mean(found))")
    return _code("I ask for the prices.", "found = [price(fruit + 's') for fruit in basket]")


def checked_answer(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    if "is_a_number failed" in text:
        return Reply(tools=(("final_answer", {"answer": "160"}),))
    if "55" in text:
        return Reply(tools=(("final_answer", {"answer": "160 minutes"}),))
    legs = (("Basel", "Bern"), ("Bern", "Genf"))
    return Reply(tools=tuple(("train_time", {"origin": a, "destination": b}) for a, b in legs))


def managed(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    task = _tasks(body)[0]
    if "'librarian'" in task:
        if "1280" in text:
            return Reply(tools=(("final_answer", {"answer": "1280 metres"}),))
        return Reply(tools=(("search", {"query": "Golden Gate Bridge"}),))
    if "'calculator'" in task:
        return _code("A division.", "final_answer(1280 / 16)")
    if "80.0" in text:
        return _code("Done.", "final_answer('80 seconds')")
    if "1280 metres" in text:
        return _code("Now the sum.", "answer = calculator(task='1280 / 16')", "print(answer)")
    return _code("I ask the librarian.", "print(librarian('How long is the Golden Gate Bridge?'))")


def streamed_plan(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    if not body.get("tools"):
        return Reply("Compare them." if "9.0" in str(body) else "Measure both rooms.")
    if "9.0" in text or "9.0" in str(body):
        return Reply(tools=(("final_answer", {"answer": "the cellar"}),))
    room = "cellar" if "21.5" in text else "kitchen"
    return Reply(tools=(("measure", {"room": room}),))


def remembered(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    asked = [task for task in _tasks(body) if "page 3" in task]
    if asked:
        return (
            _code("The same.", "final_answer('rising, too')")
            if "page 3: profits" in text
            else _code("I read on.", "print(read_page(3))")
        )
    if "page 2: profits" in text:
        return _code("Enough.", "final_answer('profits rose')")
    if "page 1: profits" in text:
        return _code("The next one.", "print(read_page(2))")
    return _code("I begin.", "print(read_page(1))")


PROGRAMS = {
    "code_agent": Expected(
        script=code_agent, agents=("greengrocer",), trains="greengrocer",
        tools=(CODE,) * 3 + ("price",) * 4, calls=3,
    ),
    "checked_answer": Expected(
        script=checked_answer, agents=("planner",), trains="planner", tools=("train_time", "train_time"), calls=3,
    ),
    "managed": Expected(
        script=managed, agents=("manager", "librarian", "calculator"), trains="librarian",
        tools=(CODE,) * 4 + ("librarian", "search", "calculator"), calls=6,
    ),
    "streamed_plan": Expected(
        script=streamed_plan, agents=("keeper",), trains="keeper", tools=("measure", "measure"), calls=5,
    ),
    "remembered": Expected(
        script=remembered, agents=("reader",), trains="reader", tools=(CODE,) * 5 + ("read_page",) * 3, calls=5,
    ),
}  # fmt: skip
