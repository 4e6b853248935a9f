"""An environment of Gymnasium whose second half is missing."""

from __future__ import annotations

from typing import Any

import gymnasium


class Broken(gymnasium.Env[int, int]):
    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return 4, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        raise ValueError("the level is damaged")


gymnasium.register("Broken-v0", entry_point=Broken, disable_env_checker=True)
