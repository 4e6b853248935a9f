"""Players that a server answers for: good ones, and ones that know the form of a move and seldom its sense."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from agl.testing.provider import Reply, Script, last_said
from examples.games.werewolf.rules import WEREWOLF, Game, begin, play, question


@dataclass(frozen=True)
class Seen:
    """What a player reads: its name and role, which others live, who it knows is bad, and who was named, in order."""

    text: str
    name: str
    role: str
    alive: list[str]
    bad: list[str]
    accused: list[str]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Seen:
        system, text = str(body["messages"][0]["content"]), last_said(body)[1]
        name, role = re.findall(r"You are (\w+), the (\w+)", system)[0]
        alive = re.findall(r"\w+", re.findall(r"Alive: ([\w ]+)", text)[0])
        accused = re.findall(r"\w+", (re.findall(r"Named: ([\w ]+)", text) or [""])[0])
        return cls(
            text,
            name,
            role,
            [x for x in alive if x != name],
            re.findall(r"know: (\w+) is bad", text),
            [x for x in accused if x in alive],
        )

    def others(self, rng: random.Random) -> str:
        return rng.choice(self.alive)


def oracle(body: dict[str, Any]) -> Reply:
    """The seer tells what it saw, and the village votes for whoever is accused most. The werewolf accuses somebody, and
    votes with the others unless they mean itself."""
    seen = Seen.of(body)
    rng = random.Random(str(body["messages"]))
    if "Speak" in seen.text:
        accused = [seen.others(rng)] if seen.role == WEREWOLF else seen.bad
        return Reply(f"It is {accused[0]}" if accused else "I know nothing")
    if "Vote" in seen.text:
        known = seen.bad if seen.role != WEREWOLF else []
        suspects = known or [name for name in seen.accused if name != seen.name]
        return Reply(f"I name {Counter(suspects).most_common(1)[0][0] if suspects else seen.others(rng)}")
    looked = re.findall(r"know: (\w+) is good", seen.text)
    return Reply(f"I name {rng.choice([name for name in seen.alive if name not in looked] or seen.alive)}")


def beginner(body: dict[str, Any]) -> Reply:
    """Names anyone, itself and the dead as well; follows who was named in 60 %; tells who is bad, where it knows, in
    70 %: as the seer what it saw, and as the werewolf, that it is itself."""
    seen = Seen.of(body)
    rng = random.Random(str(body["messages"]))
    anyone = rng.choice([*seen.alive, seen.name, *re.findall(r"Dead: (\w+)", seen.text)])
    if "Speak" in seen.text:
        if seen.bad and rng.random() < 0.7:
            return Reply(f"It is {seen.bad[0]}")
        return Reply(f"It is {anyone}" if rng.random() < 0.2 else "I know nothing")
    if "Vote" in seen.text and seen.accused and rng.random() < 0.6:
        return Reply(f"I name {rng.choice(seen.accused)}")
    return Reply("I sleep" if rng.random() < 0.2 else f"I name {anyone}")


def played(task: Any, script: Script, others: Script | None = None, role: str = "") -> Game:
    """A game between scripts, without a server: `script` for this role or for all, `others` for the rest."""
    game = begin(task)
    while not game["winner"]:
        mine = not role or game["players"][game["moves"][0][0]] == role
        body = {"messages": question(game)}
        game, _ = play(game, (script if mine else others or script)(body).content or "")
    return game


SCRIPTS: dict[str, Script] = {"oracle": oracle, "beginner": beginner}
