"""The players and the game between them, in LangGraph: one node per role. It imports nothing of agl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langgraph.graph import END, START, StateGraph
from openai import OpenAI

from examples.games.werewolf.rules import ROLES, Game, play, question


def build(base_url: str, model: str, api_key: str, earn: Callable[[float], object] = lambda points: None) -> Any:
    """The game, with all players on one model of a server that speaks OpenAI's protocol.

    Args:
        earn: called within a player's turn with what its move has earned.
    """
    client = OpenAI(base_url=base_url, api_key=api_key)

    def act(game: Game) -> Game:
        answer = client.chat.completions.create(model=model, messages=question(game), max_completion_tokens=16)
        game, points = play(game, answer.choices[0].message.content or "")
        if points:
            earn(points)
        return game

    def turn(game: Game) -> str:
        return END if game["winner"] else game["players"][game["moves"][0][0]]

    graph = StateGraph(Game)
    for role in ROLES:
        graph.add_node(role, act)  # type: ignore[arg-type]
        graph.add_conditional_edges(role, turn)
    graph.add_conditional_edges(START, turn)
    return graph.compile().with_config(recursion_limit=100)
