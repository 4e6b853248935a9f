"""What is known of the programs of this folder."""

from __future__ import annotations

from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said


def handoff(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    names = [tool["name"] for tool in body["tools"]]
    if "transfer_to_billing_agent" in names:
        return Reply(tools=(("transfer_to_billing_agent", {}),))
    return (
        Reply(f"Done: {text}.") if who == "tool" and "refunded" in text else Reply(tools=(("refund", {"order": "17"}),))
    )


def agents_as_tools(body: dict[str, Any]) -> Reply:
    system = read.body(body)[0].text
    if "translation agent" in system:
        if last_said(body)[0] == "tool":
            return Reply("Both are done.")
        calls = (("translate_to_spanish", "Good morning"), ("translate_to_french", "Good morning"))
        return Reply(tools=tuple((name, {"input": given}) for name, given in calls))
    if "inspect" in system:
        results = sorted(r.text for m in read.body(body) for r in m.tool_results)
        return Reply(" / ".join(results))
    return Reply("Buenos dias" if "Spanish" in system else "Bonjour")


def parallel_judge(body: dict[str, Any]) -> Reply:
    text = last_said(body)[1]
    if "pick the best" in read.body(body)[0].text:
        return Reply('{"best": 1, "reason": "it is polite"}')
    return Reply(f"Hasta luego ({text.rpartition(' ')[2]})")


def guardrails(body: dict[str, Any]) -> Reply:
    system, text = read.body(body)[0].text, last_said(body)[1]
    if "homework?" in system:
        found = "true" if "2x" in text else "false"
        return Reply(f'{{"reasoning": "it has an equation: {found}", "is_homework": {found}}}')
    if "phone number?" in system:
        return Reply(f'{{"has_phone_number": {"true" if "555" in text else "false"}}}')
    return Reply("Call 555-0100." if "manager" in text else "At nine.")


def session_with_context(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if who == "tool":
        return Reply(f"Done: {text}.")
    if "just take" in text:
        return Reply(f"A teapot; we have said {len(read.body(body))} things.")
    return Reply(tools=(("put_in_basket", {"product": "teapot"}),))


def streamed_tools(body: dict[str, Any]) -> Reply:
    results = [r.text for m in read.body(body) for r in m.tool_results]
    if not results:
        return Reply("Let me see.", (("how_many_jokes", {}),))
    if len(results) == 1:
        return Reply(tools=(("find_joke", {"topic": "otters"}),))
    return Reply(f"{results[0]} jokes, but {results[1]}")


def chat_completions_handoff(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "settle complaints" in read.body(body)[0].text:
        return Reply(f"I am sorry. I read {len(read.body(body))} messages.")
    if who == "tool":
        return Reply(f"I see: {text}.")
    if "complain" in text:
        return Reply(tools=(("transfer_to_manager", {"reason": "a lost order"}),))
    return Reply(tools=(("look_up_order", {"order": 4}),))


def deterministic_flow(body: dict[str, Any]) -> Reply:
    system, text = read.body(body)[0].text, last_said(body)[1]
    if "Judge" in system:
        good = "true" if "robot" in text else "false"
        return Reply(f'{{"good_quality": true, "is_scifi": {good}}}')
    return Reply(f"Outline of: {text}" if "outline from" in system else f"Once upon a time. {text}.")


def mcp_server(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if who == "tool":
        return Reply(f"The library says: {text}")
    return Reply(tools=(("reserve" if "Reserve" in text else "find_book", {"title": "Middlemarch"}),))


def own_processor(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if who == "tool":
        return Reply(f"{text}, which is 9 euros.")
    return Reply(tools=(("weigh", {"parcel": text.split()[3]}),))


PROGRAMS = {
    "handoff": Expected(
        script=handoff, agents=("Billing agent", "Triage agent"), trains="Billing agent",
        tools=("refund",), calls=3,
    ),
    "agents_as_tools": Expected(
        script=agents_as_tools, agents=("editor_agent", "french_agent", "orchestrator_agent", "spanish_agent"),
        trains="french_agent", tools=("translate_to_spanish", "translate_to_french"), calls=5,
    ),
    "parallel_judge": Expected(
        script=parallel_judge, agents=("translation_picker", "translator"), trains="translator", calls=4,
    ),
    "guardrails": Expected(
        script=guardrails, agents=("Customer support agent", "Homework check", "Leak check"),
        trains="Customer support agent", calls=7,
    ),
    "session_with_context": Expected(
        script=session_with_context, agents=("Shop assistant",), trains="Shop assistant", tools=("put_in_basket",),
        calls=3,
    ),
    "streamed_tools": Expected(
        script=streamed_tools, agents=("Joker",), trains="Joker", tools=("how_many_jokes", "find_joke"), calls=3,
    ),
    "chat_completions_handoff": Expected(
        script=chat_completions_handoff, agents=("Clerk", "Manager"), trains="Manager",
        tools=("look_up_order",), calls=4,
    ),
    "deterministic_flow": Expected(
        script=deterministic_flow, agents=("outline_checker_agent", "story_agent", "story_outline_agent"),
        trains="story_outline_agent", calls=5,
    ),
    "mcp_server": Expected(
        script=mcp_server, agents=("Librarian",), trains="Librarian", tools=("find_book", "reserve"), calls=4,
        needs=("mcp",),
    ),
    "own_processor": Expected(
        script=own_processor, agents=("Postal clerk",), trains="Postal clerk", tools=("weigh", "weigh"), calls=4,
        env={"OPENAI_AGENTS_DISABLE_TRACING": "0"},
    ),
}  # fmt: skip
