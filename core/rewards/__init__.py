"""Rewards: reporting them (`emit_reward`) and computing them (graders). Names load on first use.

A grader is built with its options and called with (task, output); it gives a float, or a dict with the parts of a
weighted sum: `agl.wrap(agent, reward=0.9 * MathAnswer() + 0.1 * RegexMatch(r"####"))`. docs/rewards.md has the table.
"""

from agl._lazy import lazy_names

_NAMES = {
    "agl.rewards.emit": ("as_rewards", "emit_exception", "emit_message", "emit_object", "emit_reward", "operation"),
    "agl.rewards.graders.base": ("Grader",),
    "agl.rewards.graders.code": ("PythonTests",),
    "agl.rewards.graders.collaboration": ("Consensus", "Rounds", "TokenBudget"),
    "agl.rewards.graders.combine": ("Weighted",),
    "agl.rewards.graders.judge": ("LLMJudge",),
    "agl.rewards.graders.maths": ("MathAnswer",),
    "agl.rewards.graders.rank": ("RankJudge",),
    "agl.rewards.graders.schema": ("JSONSchema",),
    "agl.rewards.graders.sql": ("SQLResult",),
    "agl.rewards.graders.structure": ("Depth", "Structure"),
    "agl.rewards.graders.text": ("Contains", "ExactMatch", "FuzzyMatch", "RegexMatch", "TokenF1"),
    "agl.rewards.graders.tools": ("RequiredTools", "ToolBudget", "ToolSuccess"),
    "agl.rewards.trace": ("Trace",),
    "agl.tracing": ("untrained",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
