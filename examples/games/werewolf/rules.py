"""A small werewolf: five players, of whom one is the werewolf and one the seer. The state of a game, and its moves.

At night the werewolf kills a player and the seer looks at two; by day all who live say something, one after another,
and then vote: who has more votes than any other is out. The village has won when the werewolf is out; it has lost when
two are left, or after the last day. A move that names no living other player is lost: nobody is killed or voted for.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Literal, TypedDict

WEREWOLF, SEER, VILLAGER = "werewolf", "seer", "villager"
ROLES: tuple[str, ...] = (WEREWOLF, SEER, VILLAGER)
DEALT = (WEREWOLF, SEER, VILLAGER, VILLAGER, VILLAGER)
WORDS = 6
"""Of what a player says, the others hear so many words."""
NAMED_WEREWOLF, ACCUSED_ANOTHER = 0.5, -0.25
"""What a villager or the seer earns at once, whatever the others do: for a vote or a word against the werewolf, and for
a word against anybody else. Without the second, guessing aloud pays."""

ASK = {
    "kill": "Kill one: name a player.",
    "look": "Look at one: name a player.",
    "speak": "Speak: who is bad?",
    "vote": "Vote: name a player.",
}
Move = Literal["kill", "look", "speak", "vote"]


class Game(TypedDict):
    """A game.

    Attributes:
        players: name -> role, in the order of their seats. alive: names.
        day: from 1. days: after so many the village has lost. moves: (name, move) that are still to be made, in order.
        victim: of this night, before the day; the last dead one by day. seen: what the seer knows, name -> role.
        said: (name, text) of this day. votes: name -> name.
        winner: "" while it goes on.
    """

    players: dict[str, str]
    alive: list[str]
    day: int
    days: int
    moves: list[tuple[str, Move]]
    victim: str
    seen: dict[str, str]
    said: list[tuple[str, str]]
    votes: dict[str, str]
    winner: str


def begin(task: Any) -> Game:
    """The first night of a task: {"names": five names, "roles": their roles, "days": 1 or more}."""
    players = dict(zip(task["names"], task["roles"], strict=True))
    return _night({
        "players": players, "alive": [*players], "day": 1, "days": task["days"], "moves": [], "victim": "", "seen": {},
        "said": [], "votes": {}, "winner": "",
    })  # fmt: skip


def question(game: Game) -> list[Any]:
    """What the player whose move it is gets to read: all that it knows."""
    name, move = game["moves"][0]
    known = [f"Alive: {' '.join(game['alive'])}."]
    if game["victim"] and move in ("speak", "vote"):
        known.append(f"Dead: {game['victim']}.")
    known += [f"{who}: {text}." for who, text in game["said"]]
    if move == "vote":
        # A summary, since small models overlook a name in what was said.
        names = [word for _, text in game["said"] for word in text.split() if word in game["alive"]]
        known.append(f"Named: {' '.join(names) or 'nobody'}.")
    knows = {WEREWOLF: {name: WEREWOLF}, SEER: game["seen"], VILLAGER: {}}[game["players"][name]]
    known += [f"You know: {who} is {'bad' if role == WEREWOLF else 'good'}." for who, role in knows.items()]
    about = "Five play werewolf: vote the bad one out. Be short."
    return [
        {"role": "system", "content": f"{about} You are {name}, the {game['players'][name]}."},
        {"role": "user", "content": " ".join([*known, ASK[move]])},
    ]


def named(game: Game, name: str, answer: str) -> str:
    """The living other player whom an answer names first; "" for none."""
    others = [other for other in game["alive"] if other != name]
    found = re.search(rf"\b({'|'.join(map(re.escape, others))})\b", answer)
    return found[0] if found else ""


def play(game: Game, answer: str) -> tuple[Game, float]:
    """The game after the next player's move, and what the move itself has earned."""
    (name, move), *moves = game["moves"]
    game = {**game, "moves": moves}
    target, earned = named(game, name, answer), 0.0
    if move == "kill":
        game["victim"] = target
    elif move == "look" and target:
        game["seen"] = {**game["seen"], target: game["players"][target]}
    elif move == "speak":
        text = " ".join(re.findall(r"\w+", answer)[:WORDS])
        game["said"] = [*game["said"], (name, text or "nothing")]
    elif move == "vote" and target:
        game["votes"] = {**game["votes"], name: target}
    if move in ("speak", "vote") and target and game["players"][name] != WEREWOLF:
        wrong = ACCUSED_ANOTHER if move == "speak" else 0.0
        earned = NAMED_WEREWOLF if game["players"][target] == WEREWOLF else wrong
    if not moves:
        game = _day(game) if move in ("kill", "look") else _counted(game)
    return game, earned


def won(game: Game, role: str) -> bool:
    """Whether the side of this role has won."""
    return (game["winner"] == WEREWOLF) == (role == WEREWOLF)


def _night(game: Game) -> Game:
    at_night: dict[str, list[Move]] = {WEREWOLF: ["kill"], SEER: ["look", "look"], VILLAGER: []}
    moves: list[tuple[str, Move]] = [(name, move) for name in game["alive"] for move in at_night[game["players"][name]]]
    return {**game, "moves": moves, "victim": "", "said": [], "votes": {}}


def _day(game: Game) -> Game:
    alive = [name for name in game["alive"] if name != game["victim"]]
    if len(alive) <= 2:
        return {**game, "alive": alive, "winner": WEREWOLF}
    speak: list[tuple[str, Move]] = [(name, "speak") for name in alive]
    return {**game, "alive": alive, "moves": [*speak, *((name, "vote") for name in alive)]}


def _counted(game: Game) -> Game:
    most = Counter(game["votes"].values()).most_common(2)
    out = most[0][0] if most and (len(most) == 1 or most[0][1] > most[1][1]) else ""
    alive = [name for name in game["alive"] if name != out]
    game = {**game, "alive": alive}
    if out and game["players"][out] == WEREWOLF:
        return {**game, "winner": VILLAGER}
    if len(alive) <= 2 or game["day"] == game["days"]:
        return {**game, "winner": WEREWOLF}
    return _night({**game, "day": game["day"] + 1})
