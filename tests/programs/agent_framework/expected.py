"""What is known of the programs of this folder."""

from __future__ import annotations

import json
from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said


def system(body: dict[str, Any]) -> str:
    return "\n".join(message.text for message in read.body(body) if message.role == "system")


def tools_and_session(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if who == "tool":
        return Reply(f"I found: {text}.")
    if "Reserve" in text:
        return Reply(tools=(("reserve", {"item": "lamp", "count": 2}),))
    return Reply(tools=(("get_stock", {"item": "lamp"}),))


def streaming_with_middleware(body: dict[str, Any]) -> Reply:
    if any("sunny" in message.text or message.tool_results for message in read.body(body)):
        return Reply("It is sunny in Oslo, dear guest.")
    return Reply(tools=(("get_weather", {"city": "Oslo"}),))


def sequential_review(body: dict[str, Any]) -> Reply:
    return Reply("A fine slogan." if "review" in system(body) else "Ride the future.")


def concurrent_experts(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "expert in research" in system(body):
        return Reply(f"I found {text}.") if who == "tool" else Reply(tools=(("search", {"query": "bicycles"}),))
    return Reply("It sells well." if "expert in marketing" in system(body) else "Both like it.")


def handoff_support(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "right specialist" in system(body):
        return Reply(tools=(("handoff_to_refund_agent", {}),))
    if who == "tool" and "refunded" in text:
        return Reply("Your order is refunded. Anything else?")
    if "17" in text:
        return Reply(tools=(("refund_order", {"order": "17"}),))
    return Reply("Goodbye." if "thank" in text else "Which order is it?")


def group_chat(body: dict[str, Any]) -> Reply:
    said = "\n".join(message.text for message in read.body(body))
    if "lead a team" in system(body):
        speaker = (
            None if "scattered" in said and "Because" in said else "Writer" if "scattered" in said else "Researcher"
        )
        done = {"terminate": speaker is None, "reason": "so", "next_speaker": speaker}
        return Reply(json.dumps({**done, "final_message": None if speaker else "Blue light is scattered most."}))
    return Reply("Blue light is scattered." if "collect facts" in system(body) else "Because blue light is scattered.")


def magentic_team(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "find facts" in system(body):
        return Reply("A lamp needs 9 W.")
    if "compute things" in system(body):
        return Reply(f"It is {text} Wh.") if who == "tool" else Reply(tools=(("calculate", {"a": 20, "b": 9}),))
    if "pre-survey" in text:
        return Reply("GIVEN: 20 lamps of 9 W.")
    if "bullet-point plan" in text:
        return Reply("- look up\n- compute")
    if "final answer" in text:
        return Reply("They need 180 Wh.")
    said = "\n".join(message.text for message in read.body(body))
    done, found = "It is 180.0 Wh" in said, "A lamp needs" in said

    def item(answer: Any) -> dict[str, Any]:
        return {"reason": "so", "answer": answer}

    return Reply(
        json.dumps({
            "is_request_satisfied": item(done), "is_in_loop": item(False), "is_progress_being_made": item(True),
            "next_speaker": item("CoderAgent" if found else "ResearcherAgent"),
            "instruction_or_question": item("Compute it." if found else "How much does a lamp need?"),
        })
    )  # fmt: skip


def agent_as_tool(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "translate words" in system(body):
        return Reply(text) if who == "tool" else Reply(tools=(("look_up", {"word": "bicycle"}),))
    if "draft" in system(body):
        return Reply("A sykkel, a nickel.")
    if "polish" in system(body):
        return Reply("My sykkel cost a nickel.")
    if who == "tool":
        return Reply(text) if "nickel" in text else Reply(tools=(("rhyme", {"topic": "sykkel"}),))
    return Reply(tools=(("translate", {"word": "bicycle"}),))


def spam_routing(body: dict[str, Any]) -> Reply:
    text = last_said(body)[1]
    if "classify" in system(body):
        return Reply(json.dumps({"kind": "question" if "?" in text else "spam", "mail": text}))
    return Reply("We open at nine.")


PROGRAMS = {
    "tools_and_session": Expected(
        script=tools_and_session, agents=("ShopAssistant",), trains="ShopAssistant", tools=("get_stock", "reserve"),
        calls=4,
    ),
    "streaming_with_middleware": Expected(
        script=streaming_with_middleware, agents=("WeatherAgent",), trains="WeatherAgent", tools=("get_weather",),
        calls=2,
    ),
    "sequential_review": Expected(
        script=sequential_review, agents=("reviewer", "writer"), trains="writer", calls=2,
    ),
    "concurrent_experts": Expected(
        script=concurrent_experts, agents=("marketing", "own_tracing", "research"), trains="marketing",
        tools=("search",), calls=4,
    ),
    "handoff_support": Expected(
        script=handoff_support, agents=("refund_agent", "triage_agent"), trains="refund_agent",
        tools=("refund_order",), calls=5, env={"PYTHONHASHSEED": "0"},
    ),
    "group_chat": Expected(
        script=group_chat, agents=("Orchestrator", "Researcher", "Writer"), trains="Orchestrator", calls=5,
    ),
    "magentic_team": Expected(
        script=magentic_team, agents=("CoderAgent", "MagenticManager", "ResearcherAgent"), trains="ResearcherAgent",
        tools=("calculate",), calls=9,
    ),
    "agent_as_tool": Expected(
        script=agent_as_tool, agents=("coordinator", "drafter", "polisher", "translator"), trains="translator",
        tools=("translate", "look_up", "rhyme"), calls=7,
    ),
    "spam_routing": Expected(
        script=spam_routing, agents=("mail_assistant", "spam_detector"), trains="spam_detector", calls=3,
    ),
}  # fmt: skip
