"""What is known of the programs of this folder."""

from __future__ import annotations

import json
from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said


def system(body: dict[str, Any]) -> str:
    return "\n".join(message.text for message in read.body(body) if message.role == "system")


def assistant_with_reflection(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if who == "tool":
        return Reply(f"It is {text}.")
    if "euros" in text:
        return Reply(tools=(("convert", {"kroner": 30}),))
    return Reply(tools=(("find_price", {"item": "lamp"}),))


def round_robin_reflection(body: dict[str, Any]) -> Reply:
    said = "\n".join(message.text for message in read.body(body))
    if "write poems" in system(body):
        return Reply("Blader faller." if "Norwegian" in said else "Leaves, brown." if "rhyme" in said else "Leaves.")
    return Reply("APPROVE" if "brown" in said else "Make it rhyme.")


def selector_research(body: dict[str, Any]) -> Reply:
    prompt = system(body)
    if "You plan" in prompt:
        return Reply("-25 %. TERMINATE" if "-25" in str(body) else "First search, then compute.")
    if "search the web" in prompt:
        return Reply(tools=(("search_web", {"query": "points"}),))
    if "with your tool" in prompt:
        return Reply(tools=(("percentage_change", {"start": 1200, "end": 900}),))
    return Reply("planner" if "-25" in prompt else "data_analyst" if "1200" in prompt else "web_searcher")


def swarm_refund(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    said = "\n".join(message.text for message in read.body(body)) + json.dumps(body["messages"])
    if "travel agent" in system(body):
        return Reply(
            "All done. TERMINATE" if "refunded" in said else None, _calls("refunded" in said, "flights_refunder")
        )
    if who == "tool" and "refunded" in text:
        return Reply(tools=(("transfer_to_travel_agent", {}),))
    if "507811" in said:
        return Reply(tools=(("refund_flight", {"flight_id": "507811"}),))
    return Reply(tools=(("transfer_to_user", {}),))


def _calls(done: bool, target: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    return () if done else ((f"transfer_to_{target}", {}),)


def magentic_one(body: dict[str, Any]) -> Reply:
    text = last_said(body)[1]
    said = "\n".join(message.text for message in read.body(body))
    if "read web pages" in system(body):
        return Reply("A page says: test by division.")
    if "write code" in system(body):
        return Reply("It prints 97.")
    if "pre-survey" in text:
        return Reply("GIVEN: below 100.")
    if "bullet-point plan" in text:
        return Reply("- read\n- code")
    if "final answer" in text or "pure JSON" not in text:
        return Reply("It is 97.")
    coded, surfed = "prints 97" in said, "A page says" in said

    def item(answer: Any) -> dict[str, Any]:
        return {"reason": "so", "answer": answer}

    return Reply(
        json.dumps({
            "is_request_satisfied": item(coded), "is_in_loop": item(False), "is_progress_being_made": item(True),
            "next_speaker": item("coder" if surfed else "web_surfer"),
            "instruction_or_question": item("Write it." if surfed else "Read about it."),
        })
    )  # fmt: skip


def graph_flow(body: dict[str, Any]) -> Reply:
    prompt, said = system(body), "\n".join(message.text for message in read.body(body))
    if "Draft" in prompt:
        return Reply("A better draft." if "REVISE" in said.replace(prompt, "") else "A draft.")
    if "style" in prompt and last_said(body)[0] != "tool":
        return Reply(tools=(("style_guide", {}),))
    if "grammar" in prompt or "style" in prompt:
        what = "grammar" if "grammar" in prompt else "style"
        return Reply(f"{what} of {'the better' if 'better' in said else 'the first'} draft")
    if "REVISE or" in prompt:
        return Reply("ACCEPT: well done." if "better" in said else "REVISE: too short.")
    return Reply("It is now well written.")


def core_pipeline(body: dict[str, Any]) -> Reply:
    text = last_said(body)[1]
    for prompt, answer in (("List", "steel"), ("Write", "buy steel"), ("Correct", "Buy steel.")):
        if system(body).startswith(prompt):
            return Reply(answer)
    return Reply(text)


def core_tool_agent(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if who == "tool":
        return Reply(f"It costs {text}.")
    return Reply(tools=(("get_stock_price", {"ticker": "ACME" if "ACME" in text else "BOLT"}),))


def agent_tool(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    prompt = system(body)
    if "Write well" in prompt:
        return Reply("The sea is wide.")
    if "You judge" in prompt:
        return Reply("no mistakes" if "spelling" in prompt else "witty enough")
    if who != "tool":
        return Reply(tools=(("writer", {"task": "A line about the sea."}),))
    if "wide" in text:
        return Reply(tools=(("panel", {"task": text}),))
    return Reply(json.dumps({"verdict": "good", "text": text}))


def ag2_subagents(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "look facts up" in system(body):
        return Reply(f"I read {text}.") if who == "tool" else Reply(tools=(("population", {"city": "Oslo"}),))
    if who == "tool":
        return Reply("It is noted." if "noted" in text else "700,000 people.")
    if "Write" in text:
        return Reply(tools=(("write_down", {"note": "Oslo: 700,000"}),))
    return Reply(tools=(("research", {"objective": "How many people live in Oslo?"}),))


PROGRAMS = {
    "assistant_with_reflection": Expected(
        script=assistant_with_reflection, agents=("shop_assistant",), trains="shop_assistant",
        tools=("find_price", "convert"), calls=4,
    ),
    "round_robin_reflection": Expected(
        script=round_robin_reflection, agents=("critic", "primary"), trains="primary", calls=6,
    ),
    "selector_research": Expected(
        script=selector_research, agents=("SelectorGroupChatManager", "data_analyst", "planner", "web_searcher"),
        trains="data_analyst", tools=("search_web", "percentage_change"), calls=7,
    ),
    "swarm_refund": Expected(
        script=swarm_refund, agents=("flights_refunder", "travel_agent"), trains="flights_refunder",
        tools=("transfer_to_flights_refunder", "transfer_to_user", "refund_flight", "transfer_to_travel_agent"),
        calls=5,
    ),
    "magentic_one": Expected(
        script=magentic_one, agents=("MagenticOneOrchestrator", "coder", "web_surfer"), trains="web_surfer", calls=8,
    ),
    "graph_flow": Expected(
        script=graph_flow, agents=("grammar_editor", "reviewer", "style_editor", "summarizer", "writer"),
        trains="style_editor", tools=("style_guide", "style_guide"), calls=11,
    ),
    "core_pipeline": Expected(
        script=core_pipeline, agents=("ConceptExtractor", "Copywriter", "Proofreader"), trains="Copywriter", calls=3,
    ),
    "core_tool_agent": Expected(
        script=core_tool_agent, agents=("broker",), trains="broker", tools=("get_stock_price", "get_stock_price"),
        calls=4,
    ),
    "agent_tool": Expected(
        script=agent_tool, agents=("assistant", "spelling", "wit", "writer"), trains="wit", tools=("writer", "panel"),
        calls=6,
    ),
    "ag2_subagents": Expected(
        script=ag2_subagents, agents=("coordinator", "researcher"), trains="researcher",
        tools=("research", "population", "write_down"), calls=6, needs=("ag2.middleware",),
    ),
}  # fmt: skip
