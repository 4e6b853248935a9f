"""Seatings: five names in an order, and a role for each. Roles rotate over the seats, equally often."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

from agl.mdp import Trajectory
from examples.games.werewolf.rules import DEALT, ROLES, Game, won

NAMES = ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay", "Gus", "Hal")
ROTATIONS = sorted(set(permutations(DEALT)))
"""The twenty ways to deal the roles to five seats."""


def seatings(n: int, seed: int, split: str, days: int = 2) -> list[dict[str, Any]]:
    """`n` games of the split "train" or "held_out", which share no order of names."""
    orders = list(permutations(NAMES, 5))
    random.Random(0).shuffle(orders)
    tenth = len(orders) // 10
    orders = orders[:tenth] if split == "held_out" else orders[tenth:]
    random.Random(f"{seed} {split}").shuffle(orders)
    return [{"names": list(orders[k]), "roles": list(ROTATIONS[k % len(ROTATIONS)]), "days": days} for k in range(n)]


def reward(task: Any, game: Game) -> dict[str, float]:
    """1 for each role whose side has won, by the role's name, else 0."""
    return {role: float(won(game, role)) for role in ROLES}


def credit(trajectory: Trajectory) -> list[float]:
    """A call gets what its own move has earned, and what its role has earned by the game."""
    of_role = {reward.agent: reward.value for reward in trajectory.rewards}
    return [t.reward + of_role[t.call.agent] for t in trajectory.transitions]
