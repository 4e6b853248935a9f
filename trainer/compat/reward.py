"""0.3's deprecated module of reward emitters, which is its `@reward` decorator too."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from agl.trainer.compat.emitter import (
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    is_reward_span,
    reward,
)

__all__ = ["emit_reward", "find_final_reward", "find_reward_spans", "get_reward_value", "is_reward_span", "reward"]


class _Callable(types.ModuleType):
    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return reward(function)


sys.modules[__name__].__class__ = _Callable
