"""What is known of the programs of this folder."""

from __future__ import annotations

from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said

ROOT = "own_tracing"
"""The whole program, which calls no agent's model: by the name of the script that `agl run` is given."""


def two_frameworks(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "Answer politely." in str(body):
        return Reply("Dear customer, please add paper.")
    if who == "tool":
        return Reply(f"I found out: {text}.")
    return Reply(tools=(("status", {"machine": "printer 4"}),))


def second_opinion(body: dict[str, Any]) -> Reply:
    who, _ = last_said(body)
    told = str(body)
    if "careful colleague" in told:
        return Reply("It is hay fever.")
    if "You are a nurse." in told:
        return Reply("It is a cold.")
    if who == "tool":
        return Reply("It is hay fever, with a cold.")
    case = {"case": "sneezes"}
    return Reply("Let me ask.", tools=(("ask_claude", case), ("ask_nurse", case)))


def in_threads(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    told = str(body)
    if "word_of_the_day" in told:
        if "anchor" in told.partition("A verse about")[2]:
            return Reply(tools=(("final_answer", {"answer": "An anchor in the sand"}),))
        return Reply(tools=(("word_of_the_day", {"letter": "a"}),))
    if "Give a title." in told:
        return Reply("The Sea")
    return Reply("The sea is calm." if "Correct" in told else f"{text} is calmm.")


def in_processes(body: dict[str, Any]) -> Reply:
    _, text = last_said(body)
    if "how the class did" in str(body):
        return Reply(f"Well: {text}.")
    return Reply("5" if "whales" in text else "4")


def late_import(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    system = read.body(body)[0].text
    if "Which plugin" in text:
        return Reply("tides")
    if "know the tides" in system:
        return Reply(f"At {text}.") if who == "tool" else Reply(tools=(("add_times", {"question": "4:10 + 0:25"}),))
    return Reply("Thought: I add.\n<code>\nfinal_answer('4:35')\n</code>")


PROGRAMS = {
    "two_frameworks": Expected(
        script=two_frameworks, agents=("Technician", "reply"), trains="Technician", tools=("status",), calls=3,
    ),
    "second_opinion": Expected(
        script=second_opinion, agents=("doctor", "nurse"), trains="nurse", tools=("ask_claude", "ask_nurse"), calls=4,
    ),
    "in_threads": Expected(
        script=in_threads, agents=("poet", "reporter", "proof_reader", ROOT), trains="proof_reader",
        tools=("word_of_the_day",), calls=5,
    ),
    "in_processes": Expected(
        script=in_processes, agents=("grader", "principal"), trains="grader", calls=3,
    ),
    "late_import": Expected(
        script=late_import, agents=("skipper", "almanac", ROOT), trains="skipper",
        tools=("add_times", "python_interpreter"), calls=4,
    ),
}  # fmt: skip
