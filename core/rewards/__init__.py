"""Rewards: reporting them (`emit_reward`) and computing them (graders). Names load on first use.

A grader is built with its options and called with (task, output); it gives a float, or a dict with the parts of a
weighted sum: `agl.wrap(agent, reward=0.9 * MathAnswer() + 0.1 * RegexMatch(r"####"))`. docs/rewards.md has the table.
"""

from agl._lazy import lazy_names

_NAMES = {
    "agl.rewards.emit": ("as_rewards", "emit_exception", "emit_message", "emit_object", "emit_reward", "operation"),
    "agl.rewards.files": ("read_text",),
    "agl.trainer.graders.base": ("Grader", "Weighted"),
    "agl.trainer.graders.code": ("PythonTests",),
    "agl.trainer.processes.container": ("Container",),
    "agl.trainer.graders.collaboration": ("Consensus", "Rounds", "TokenBudget"),
    "agl.trainer.graders.judge": ("LLMJudge",),
    "agl.trainer.graders.maths": ("MathAnswer",),
    "agl.trainer.graders.rank": ("RankJudge",),
    "agl.trainer.graders.schema": ("JSONSchema",),
    "agl.trainer.graders.sql": ("SQLResult",),
    "agl.trainer.graders.structure": ("Depth", "Structure"),
    "agl.trainer.graders.text": ("Contains", "ExactMatch", "FuzzyMatch", "RegexMatch", "TokenF1"),
    "agl.trainer.graders.tools": ("RequiredTools", "ToolBudget", "ToolSuccess"),
    "agl.rewards.trace": ("Trace",),
    "agl.tracing": ("untrained",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
