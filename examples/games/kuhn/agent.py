"""Two players and the game between them, in LangGraph. It imports nothing of agl."""

from __future__ import annotations

from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from openai import OpenAI

from examples.games.kuhn.rules import ACTIONS, CARDS, PLAYERS, History, payoff, to_act


class Game(TypedDict):
    """The state of the graph: each player's card, and the actions so far."""

    cards: list[str]
    history: list[str]


def begin(task: Any) -> Game:
    """The game before anybody has acted."""
    return {"cards": task["cards"], "history": []}


def question(card: str, history: History) -> list[Any]:
    """What the player to act is asked: all that it may know."""
    rules = f"Kuhn poker. Cards: {' < '.join(CARDS)}. Answer {' or '.join(ACTIONS)}."
    so_far = f"So far: {', '.join(history)}." if history else "You begin."
    return [{"role": "system", "content": rules}, {"role": "user", "content": f"Your card: {card}. {so_far}"}]


def action(answer: str) -> str:
    """The action that an answer is: whatever does not begin with "bet" passes, so that every answer is an action."""
    return "bet" if answer.lstrip().lower().startswith("bet") else "pass"


def build(base_url: str, model: str, api_key: str) -> Any:
    """The game, with both players on one model of a server that speaks OpenAI's protocol."""
    client = OpenAI(base_url=base_url, api_key=api_key)

    def act(game: Game) -> dict[str, list[str]]:
        history = tuple(game["history"])
        messages = question(game["cards"][len(history) % 2], history)
        answer = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=8)
        return {"history": [*history, action(answer.choices[0].message.content or "")]}

    def turn(game: Game) -> str:
        player = to_act(tuple(game["history"]))
        return END if player is None else PLAYERS[player]

    graph = StateGraph(Game)
    for name in PLAYERS:
        graph.add_node(name, act)  # type: ignore[arg-type]
        graph.add_conditional_edges(name, turn)
    graph.add_edge(START, PLAYERS[0])
    return graph.compile()


def reward(task: Any, output: Game) -> dict[str, float]:
    """What each player has won, in antes, by its name."""
    won = float(payoff((task["cards"][0], task["cards"][1]), tuple(output["history"])))
    return dict(zip(PLAYERS, (won, -won), strict=True))
