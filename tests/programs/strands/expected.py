"""What is known of the programs of this folder."""

from __future__ import annotations

from typing import Any

from program_table import Expected

from agl.messages import read
from agl.testing.provider import Reply, last_said


def _tools(body: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in body.get("tools") or ()]


def _results(body: dict[str, Any]) -> list[str]:
    """The results of all tools in the conversation."""
    return [result.text for message in read.body(body) for result in message.tool_results]


def order_desk(body: dict[str, Any]) -> Reply:
    match _results(body):
        case []:
            return Reply("Let me look.", tools=(("stock", {"item": "unicorn"}), ("stock", {"item": "lamp"})))
        case [_, _]:
            return Reply(tools=(("order", {"item": "lamp", "amount": 9}),))
        case [*_, ordered]:
            return Reply(f"No unicorn, but {ordered}.")


def agents_as_tools(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    system = read.body(body)[0].text
    if "right specialist" in system:
        if who == "tool":
            return Reply(f"So: {' '.join(_results(body))}")
        return Reply(
            tools=(
                ("travel_expert", {"question": "How far is Oslo?"}),
                ("packer", {"input": "Oslo"}),
                ("ask_cook", {"input": "Oslo"}),
            )
        )
    if "plan journeys" in system:
        return Reply(f"{text}.") if who == "tool" else Reply(tools=(("distance", {"city": "Oslo"}),))
    return Reply("Take a coat." if "pack" in system else "Eat herrings.")


def swarm(body: dict[str, Any]) -> Reply:
    system, results = read.body(body)[0].text, _results(body)

    def hand_over(to: str, message: str, **context: Any) -> Reply:
        return Reply(tools=(("handoff_to_agent", {"agent_name": to, "message": message, "context": context}),))

    if "collect facts" in system:
        return Reply("Handed over.") if results else hand_over("author", "Write it.", fact="Herrings glitter.")
    if "a verse" in system:
        assert "Herrings glitter." in str(body)
        if "six words" in str(body):
            return Reply("Herrings glitter in the deep.")
        verse = "Herrings glitter and gleam in the deep."
        return Reply("Handed over.") if results else hand_over("critic", "Is it short?", verse=verse)
    match results:
        case []:
            return Reply(tools=(("count_words", {"text": "Herrings glitter and gleam in the deep."}),))
        case [count]:
            return hand_over("author", f"It has {count}, six words are enough.")
    return Reply("Handed back.")


def graph(body: dict[str, Any]) -> Reply:
    told = str(body)
    if "You are the botanist" in told:
        return Reply("Water lilies.")
    if "You are the zoologist" in told:
        return Reply("Frogs.")
    assert "Water lilies." in told or "You are the writer" in told
    assert "Frogs." in told or "You are the writer" in told
    return Reply("That is enough." if "You are the judge" in told else "Frogs on water lilies.")


def conversation(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    if "Profile" in _tools(body):
        return Reply(tools=(("Profile", {"name": "Ada", "likes": ["tench"]}),))
    if who == "tool":
        return Reply(f"I see, {text}.")
    if "tench" in text:
        return Reply(tools=(("look_up", {"word": "tench"}),))
    told = [m.text for m in read.body(body) if m.role == "user"]
    return Reply("Hello, Ada." if "Ada" in text else f"I have forgotten it, I know of {len(told)} things you said.")


def mcp_tools(body: dict[str, Any]) -> Reply:
    match _results(body):
        case []:
            return Reply(tools=(("find_book", {"title": "Emma"}),))
        case [_]:
            return Reply(tools=(("reserve", {"title": "Emma", "days": 30}),))
        case [_, _]:
            return Reply(tools=(("reserve", {"title": "Emma", "days": 14}),))
        case [*_, last]:
            return Reply(f"{last}.")


PROGRAMS = {
    "order_desk": Expected(
        script=order_desk, agents=("clerk",), trains="clerk", tools=("stock", "stock", "order"), calls=3,
    ),
    "agents_as_tools": Expected(
        script=agents_as_tools, agents=("orchestrator", "travel_expert", "packer", "Cook"), trains="travel_expert",
        tools=("travel_expert", "packer", "ask_cook", "distance"), calls=6,
    ),
    "swarm": Expected(
        script=swarm, agents=("researcher", "author", "critic"), trains="author",
        tools=("handoff_to_agent",) * 3 + ("count_words",), calls=8,
    ),
    "graph": Expected(
        script=graph, agents=("botanist", "zoologist", "judge", "writer"), trains="judge", calls=4,
        # Strands keeps a graph's edges in a set, and their order is that of the judge's input.
        env={"PYTHONHASHSEED": "1"},
    ),
    "conversation": Expected(
        script=conversation, agents=("friend",), trains="friend", tools=("look_up", "Profile"), calls=5,
    ),
    "mcp_tools": Expected(
        script=mcp_tools, agents=("reader",), trains="reader", tools=("find_book", "reserve", "reserve"), calls=4,
    ),
}  # fmt: skip
