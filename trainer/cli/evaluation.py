"""What `agl eval` does with its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl.errors import ConfigError
from agl.trainer.evaluation import views
from agl.trainer.evaluation.evaluate import evaluate
from agl.trainer.evaluation.evaluation import Evaluation
from agl.trainer.run.data import read_tasks
from agl.trainer.runners.loading import load_agent, load_group_reward


def named(words: Sequence[str]) -> list[tuple[str, str]]:
    """Policies of a command line by name: `NAME=MODEL`, or a model alone, which then is its own name."""
    pairs = []
    for word in words:
        name, equals, model = word.partition("=")
        is_named = equals and name and model and not Path(word).exists()
        pairs.append((name, model) if is_named else (word, word))
    return pairs


def run_evaluation(
    policies: Sequence[str],
    against: str | None,
    tasks: Path,
    agent: str,
    reward: str | None,
    *,
    fail_below: float | None,
    html: Path | None,
    markdown: Path | None,
    **options: Any,
) -> tuple[Evaluation, list[str]]:
    """Evaluate, print the table and write the files.

    Args:
        options: those of `evaluate`.

    Returns:
        The evaluation, and the policies below `fail_below`.
    """
    if against is not None and not policies:
        raise ConfigError("--against what?", hint="agl eval RUN_DIR --against OTHER_RUN_DIR")
    references = named([against] if against is not None else [])
    evaluated = [*references, *named(policies)]
    held_out = read_tasks(tasks)
    report = evaluate(
        load_agent(agent, reward), held_out, evaluated or None, reward=load_group_reward(reward), **options
    )
    report.table()
    for path, text in ((html, views.page), (markdown, views.markdown)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(report), encoding="utf-8")
    judged = [p for p in report.policies.values() if p.name not in dict(references)]
    return report, [p.name for p in judged if fail_below is not None and p.success_bounds[0] < fail_below]
