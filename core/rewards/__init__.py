"""Rewards: reporting them (`emit_reward`) and computing them (graders). Names load on first use.

A grader is built with its options and called with (task, output); it gives a float, or a dict with the parts of a
weighted sum: `agl.wrap(agent, reward=0.9 * MathAnswer() + 0.1 * RegexMatch(r"####"))`. docs/rewards.md has the table.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agl.rewards.emit import as_rewards, emit_exception, emit_message, emit_object, emit_reward, operation

if TYPE_CHECKING:
    from agl.rewards.graders.base import Grader
    from agl.rewards.graders.code import PythonTests
    from agl.rewards.graders.collaboration import Consensus, Rounds, TokenBudget
    from agl.rewards.graders.combine import Weighted
    from agl.rewards.graders.judge import LLMJudge
    from agl.rewards.graders.maths import MathAnswer
    from agl.rewards.graders.schema import JSONSchema
    from agl.rewards.graders.sql import SQLResult
    from agl.rewards.graders.structure import Depth, Structure
    from agl.rewards.graders.text import Contains, ExactMatch, FuzzyMatch, RegexMatch, TokenF1
    from agl.rewards.graders.tools import RequiredTools, ToolBudget, ToolSuccess
    from agl.rewards.trace import Trace
    from agl.tracing.context import untrained

_NAMES = {
    "agl.rewards.graders.base": ("Grader",),
    "agl.rewards.graders.code": ("PythonTests",),
    "agl.rewards.graders.collaboration": ("Consensus", "Rounds", "TokenBudget"),
    "agl.rewards.graders.combine": ("Weighted",),
    "agl.rewards.graders.judge": ("LLMJudge",),
    "agl.rewards.graders.maths": ("MathAnswer",),
    "agl.rewards.graders.schema": ("JSONSchema",),
    "agl.rewards.graders.sql": ("SQLResult",),
    "agl.rewards.graders.structure": ("Depth", "Structure"),
    "agl.rewards.graders.text": ("Contains", "ExactMatch", "FuzzyMatch", "RegexMatch", "TokenF1"),
    "agl.rewards.graders.tools": ("RequiredTools", "ToolBudget", "ToolSuccess"),
    "agl.rewards.trace": ("Trace",),
    "agl.tracing.context": ("untrained",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Consensus",
    "Contains",
    "Depth",
    "ExactMatch",
    "FuzzyMatch",
    "Grader",
    "JSONSchema",
    "LLMJudge",
    "MathAnswer",
    "PythonTests",
    "RegexMatch",
    "RequiredTools",
    "Rounds",
    "SQLResult",
    "Structure",
    "TokenBudget",
    "TokenF1",
    "ToolBudget",
    "ToolSuccess",
    "Trace",
    "Weighted",
    "as_rewards",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "operation",
    "untrained",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'agl.rewards' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
