"""Players that a server answers for: good ones, and ones that know the form of a move and seldom its sense."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from agl.testing.provider import Reply, Script, last_said
from examples.games.werewolf.rules import SEER, WEREWOLF


@dataclass(frozen=True)
class Seen:
    """What a player reads: its name and role, who lives, what it saw and who was accused, in order."""

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
        accused = re.findall(r"\w+: (\w+) is bad", text.replace("You saw:", ""))
        return cls(
            text,
            name,
            role,
            [x for x in alive if x != name],
            re.findall(r"saw: (\w+) is bad", text),
            [x for x in accused if x in alive],
        )

    def others(self, rng: random.Random) -> str:
        return rng.choice(self.alive)


def oracle(body: dict[str, Any]) -> Reply:
    """The seer tells what it saw, and the village votes for whoever is accused first. The werewolf does nothing: it is
    what the village is measured against."""
    seen = Seen.of(body)
    rng = random.Random(seen.text + seen.name)
    if "Speak" in seen.text:
        return Reply(f"{seen.bad[0]} is bad" if seen.bad else "I know nothing")
    if seen.role == WEREWOLF:
        return Reply("I sleep")
    if "Vote" in seen.text:
        return Reply((seen.bad or seen.accused or ["nobody"])[0])
    known = re.findall(r"saw: (\w+) is good", seen.text)
    return Reply(seen.others(rng) if not known else ([x for x in seen.alive if x not in known] or seen.alive)[0])


def beginner(body: dict[str, Any]) -> Reply:
    """Names anyone, itself and the dead as well, hardly ever follows an accusation, and as the seer seldom tells."""
    seen = Seen.of(body)
    rng = random.Random(str(body["messages"]))
    anyone = [*seen.alive, seen.name, *re.findall(r"Dead: (\w+)", seen.text)]
    if "Speak" in seen.text:
        if seen.role == SEER and seen.bad and rng.random() < 0.4:
            return Reply(f"{seen.bad[0]} is bad")
        return Reply(rng.choice((f"{rng.choice(anyone)} is bad", f"{rng.choice(anyone)} is good", "I know nothing")))
    if "Vote" in seen.text and seen.accused and rng.random() < 0.3:
        return Reply(rng.choice(seen.accused))
    return Reply("I sleep" if rng.random() < 0.2 else rng.choice(anyone))


SCRIPTS: dict[str, Script] = {"oracle": oracle, "beginner": beginner}
