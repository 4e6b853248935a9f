"""Gymnasium's environments with discrete actions, played in text: the model sees the board and names an action."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
from gymnasium.envs.registration import load_env_creator

from agl.errors import ConfigError
from agl_environments.asking import Ask, Message, message_of


class _Game(NamedTuple):
    actions: tuple[str, ...]
    rules: str
    floor: float


GAMES = {
    "FrozenLake": _Game(
        ("left", "down", "right", "up"),
        "Walk over the ice from S to G. F is ice; in a hole, H, the game is lost. You are at the letter in brackets.",
        0.0,
    ),
    "Taxi": _Game(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Drive the taxi (yellow; green with a passenger) to the passenger (blue), pick them up, and drop them off at "
        "the destination (magenta). | is a wall.",
        -2000.0,
    ),
    "CliffWalking": _Game(
        ("up", "right", "down", "left"), "Walk from x to T. C is the cliff: it costs 100 and leads back.", -10_000.0
    ),
    "Blackjack": _Game(
        ("stick", "hit"), "Blackjack. You see (your sum, the dealer's card, 1 if you have a usable ace).", -1.0
    ),
}
"""Name without version -> its actions by number, its rules, and the lowest score of 100 turns (Taxi: 200)."""
_COLOURS = dict(enumerate(("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white")))
_COLOURED = re.compile(r"((?:\x1b\[[\d;]*m)+)(.*?)\x1b\[0m")


class Games:
    """One environment, such as "FrozenLake-v1", or "module:Name-v0" for one that importing a module registers.

    Args:
        actions: the names of its actions, by number.
        rules: what the model is told.
        floor: the score of an episode that
            the policy ends with an answer which names no action; no other may be lower. All three are known of
            FrozenLake, Taxi, CliffWalking and Blackjack.
        max_turns: after so many the episode ends.
        **options: of `gymnasium.make`. FrozenLake without a map gets a random one per task.
    """

    def __init__(
        self,
        name: str,
        *,
        actions: Sequence[str] | None = None,
        rules: str | None = None,
        floor: float | None = None,
        max_turns: int = 100,
        **options: Any,
    ) -> None:
        module, _, own = name.rpartition(":")
        game = GAMES.get(own.partition("-v")[0])
        if game is None and (actions is None or floor is None):
            raise ConfigError(
                f"agl does not know the actions of {name}",
                hint="actions=['left', 'right'], rules='what the model is told', floor=the lowest score of an episode",
            )
        try:
            if module:
                importlib.import_module(module)
            spec = gymnasium.spec(own)
        except (ImportError, gymnasium.error.Error) as error:
            raise ConfigError(f"gymnasium has no environment {name!r}: {error}") from error
        self._name, self._options, self._lake = name, options, name.startswith("FrozenLake")
        self._actions = tuple(actions or (game.actions if game else ()))
        self._rules = rules or (game.rules if game else "")
        self.floor = floor if floor is not None else game.floor if game else 0.0
        self._turns = max(max_turns, spec.max_episode_steps or 0)
        with_text = "ansi" in getattr(_creator(spec), "metadata", {}).get("render_modes", ())
        self._render = {"render_mode": "ansi"} if with_text else {}

    def tasks(self, n: int | None, seed: int) -> list[dict[str, Any]]:
        tasks = [{"game": self._name, "seed": seed + i, "options": dict(self._options)} for i in range(n or 100)]
        if self._lake and not self._options.keys() & {"desc", "map_name"}:
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map

            for task in tasks:
                task["options"]["desc"] = generate_random_map(size=4, seed=task["seed"])
        return tasks

    async def play(self, task: Mapping[str, Any], ask: Ask) -> float:
        game = gymnasium.make(task["game"], **self._render, **task["options"])
        try:
            seen, _ = game.reset(seed=task["seed"])
            names = ", ".join(self._actions)
            system = f"{self._rules} Answer with one action: {names}."
            messages: list[Message] = [{"role": "system", "content": system}]
            total = 0.0
            for _ in range(self._turns):
                messages.append({"role": "user", "content": self._text(game, seen)})
                messages.append(message_of(await ask(messages)))
                action = self._action(messages[-1]["content"])
                if action is None:
                    return self.floor
                seen, reward, terminated, truncated, _ = game.step(action)
                total += float(reward)
                if terminated or truncated:
                    break
            return total
        finally:
            game.close()

    def _text(self, game: Any, seen: Any) -> str:
        if not self._render:
            return str(tuple(int(v) for v in seen) if isinstance(seen, tuple) else seen)
        return _COLOURED.sub(_bracketed, game.render()).strip("\n")

    def _action(self, answer: str) -> int | None:
        """The action that the answer names last."""
        found = re.findall(rf"\b({'|'.join(map(re.escape, self._actions))})\b", answer.lower())
        return self._actions.index(found[-1]) if found else None


def _creator(spec: Any) -> Any:
    where = spec.entry_point
    return load_env_creator(where) if isinstance(where, str) else where


def _bracketed(match: re.Match[str]) -> str:
    """A coloured letter in brackets, with the colour's name unless it is red."""
    codes = [int(code) for code in re.findall(r"\d+", match[1])]
    colour = next((_COLOURS[code % 10] for code in codes if code // 10 in (3, 4) and code % 10 < 8), "red")
    return f"[{match[2]}]" if colour == "red" else f"[{colour} {match[2]}]"
