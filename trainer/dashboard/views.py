"""What the store knows, as the JSON that the page shows: bounded in size, and without characters that control a screen.

Everything here was written by a model, a tool or another program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from agl.mdp.order import beginnings, in_order
from agl.mdp.spans import Span
from agl.texts import printable
from agl.trainer.report import alerts
from agl.trainer.report.rollout_report import CallReport, RolloutReport
from agl.trainer.report.trace_tree import as_json, error_line
from agl.trainer.run.about import About
from agl.trainer.run.candidates import Candidate, changes
from agl.trainer.store.types import Attempt, Metric, Rollout, RolloutSummary, TrainedCall, TrainingRun

TEXT = 20_000
SHORT_TEXT = 600
"""Longest text on a page about it, and in a table; in characters."""
MOST_TOKENS = 8_000
MOST_SPANS = 1_500
MOST_VALUES = 5_000
"""Of one answer. Tokens beyond that are on its next page; of spans, and of values within one, the first are shown."""
MOST_TEXT = 1_000_000
SPAN_TEXT = 8_000
"""Characters of one value, and of one span, of which there can be thousands: a chat span repeats the conversation."""
_DEPTH = 40


def shown(value: Any, longest: int = TEXT, total: int = MOST_TEXT) -> Any:
    """A JSON value as the page shows it: `printable` texts of at most `longest` characters each and `total` together,
    at most `MOST_VALUES` values, no more than 40 deep. Numbers that are not finite become None."""
    left = MOST_VALUES

    def walk(value: Any, depth: int) -> Any:
        nonlocal left, total
        left -= 1
        match value:
            case str():
                text = cut(value, min(longest, max(0, total)))
                total -= len(text)
                return text
            case float() if not math.isfinite(value):
                return None
            case int() if abs(value) > 2**53 and not isinstance(value, bool):
                # JavaScript would round it.
                return str(value)
            case Mapping() if depth < _DEPTH and left > 0:
                return {cut(str(k), SHORT_TEXT): walk(v, depth + 1) for k, v in list(value.items())[: max(left, 0)]}
            case list() | tuple() if depth < _DEPTH and left > 0:
                return [walk(v, depth + 1) for v in value[: max(left, 0)]]
            case Mapping() | list() | tuple():
                return "…"
        return value

    return walk(value, 0)


def cut(text: str, longest: int) -> str:
    """A printable text of at most about `longest` characters; the end says how many are left out."""
    if len(text) <= longest:
        return printable(text)
    return f"{printable(text[:longest])} … ({len(text) - longest:,} more characters)"


def run_json(run: TrainingRun, ends: Sequence[Metric] = (), about: About | None = None) -> dict[str, Any]:
    """A run. `ends`: its first and last values of some metrics, as `{name: [[step, value], ...]}`. `about`: what was
    noted on it."""
    values: dict[str, list[list[Any]]] = defaultdict(list)
    for metric in ends:
        values[metric.name].append([metric.step, metric.value])
    about = about or About()
    noted = {"name": about.name or run.name, "about": asdict(about)}
    return shown({**asdict(run), "config": dict(run.config), "ends": values, **noted}, SHORT_TEXT)


def metric_columns(metrics: Sequence[Metric]) -> dict[str, Any]:
    """Numbers as columns: the steps, and by name one value per step; None where there is none."""
    steps = sorted({m.step for m in metrics})
    place = {step: i for i, step in enumerate(steps)}
    columns: dict[str, list[float | None]] = {}
    for metric in metrics:
        column = columns.setdefault(cut(metric.name, SHORT_TEXT), [None] * len(steps))
        column[place[metric.step]] = metric.value
    return {"steps": steps, "values": columns}


def rollout_json(rollout: Rollout, longest: int = TEXT) -> dict[str, Any]:
    """A rollout as stored."""
    return shown(
        {
            "rollout_id": rollout.rollout_id,
            "run_id": rollout.run_id,
            "task": rollout.task,
            "status": rollout.status,
            "mode": rollout.mode,
            "step": rollout.step,
            "group": rollout.group,
            "index": rollout.index,
            "attempts": rollout.attempts,
            "created_at": rollout.created_at,
            "ended_at": rollout.ended_at,
            "metadata": dict(rollout.metadata),
        },
        longest,
    )


def summary_json(summary: RolloutSummary) -> dict[str, Any]:
    """A rollout as a row of a step's table."""
    return rollout_json(summary.rollout, SHORT_TEXT) | shown(
        {
            "error": None if summary.error is None else error_line(summary.error),
            "reward": summary.reward,
            "rewards": [asdict(reward) for reward in summary.rewards[:50]],
            "agents": list(summary.agents[:50]),
            "calls": summary.calls,
            "failed_calls": summary.failed_calls,
            "forks": summary.forks,
            "tokens": summary.tokens,
            "trained_tokens": summary.trained_tokens,
            "zero_advantage_tokens": summary.zero_advantage_tokens,
            "advantage": summary.advantage,
            "dropped": summary.dropped,
        },
        SHORT_TEXT,
    )


def alert_names(run: TrainingRun) -> list[str]:
    """The metrics that alerts read; those of the learner for each policy of a run that has several."""
    policies = run.config.get("policies")
    prefixes = ["", *(f"{name}/" for name in policies)] if isinstance(policies, Mapping) else [""]
    learner = [name for name in alerts.NAMES if name.startswith("learner/")]
    return [*alerts.NAMES, *(f"{prefix}{name}" for prefix in prefixes[1:] for name in learner)]


def sample_json(place: str, summary: RolloutSummary, report: RolloutReport) -> dict[str, Any]:
    """A rollout of the last step at a `place` among the others, with its last answer."""
    answers = [call.call.response.get("content") for call in report.calls if call.call.response.get("content")]
    return shown(
        {
            "place": place,
            "rollout_id": summary.rollout.rollout_id,
            "task": summary.rollout.task,
            "reward": summary.reward,
            "advantage": summary.advantage,
            "calls": summary.calls,
            "answer": answers[-1] if answers else report.output,
        },
        SHORT_TEXT,
    )


def changes_json(before: Candidate, after: Candidate) -> dict[str, Any]:
    """What a candidate's texts changed against those of another, by component."""
    texts = {name: (before.texts.get(name, ""), text) for name, text in after.texts.items()}
    changed = {name: changes(cut(old, TEXT), cut(new, TEXT)) for name, (old, new) in texts.items()}
    return {"candidate": after.number, "against": before.number, "changes": changed}


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    """An attempt; its `cause` is the line of the error that says what it was."""
    return shown(asdict(attempt) | {"cause": attempt.error and error_line(attempt.error)})


def trained_json(trained: TrainedCall) -> dict[str, Any]:
    """What training did with a call."""
    return shown(asdict(trained), SHORT_TEXT)


def report_json(report: RolloutReport, spans: Sequence[Span], first: tuple[int, int]) -> dict[str, Any]:
    """A rollout's report: its calls from position and token `first`, at most `MOST_TOKENS` tokens of them.

    Returns:
        `calls`; `next`: where the rest begins, None without one; `rows`, `tools`, `spans`, `output`, `rewards`, ...
    """
    calls: list[dict[str, Any]] = []
    start, skipped = first
    left = MOST_TOKENS
    following = None
    for position, call in enumerate(report.calls[start:], start):
        tokens = call.tokens[skipped:]
        calls.append(_call(call, position, skipped, tokens[:left]))
        if len(tokens) > left:
            following = [position, skipped + left]
            break
        left = left - len(tokens)
        skipped = 0
        if left <= 0 and position + 1 < len(report.calls):
            following = [position + 1, 0]
            break
    agents = sorted({call.call.agent for call in report.calls})
    ordered = in_order(spans)
    ids = {span.span_id for span in spans}
    # The numbers of spans that were made of calls say their order alone.
    clocked = all(call.call.span_id in ids for call in report.calls)
    begun = beginnings(ordered) if clocked else [span.start for span in ordered]
    return {
        "output": None if report.output is None else cut(report.output, TEXT),
        "rewards": [shown(asdict(reward), SHORT_TEXT) for reward in report.rewards],
        "total_reward": report.total_reward,
        "agents": shown(agents, SHORT_TEXT),
        "n_calls": len(report.calls),
        "calls": calls,
        "next": following,
        "rows": [shown(asdict(row), SHORT_TEXT) for row in report.rows],
        "tools": shown(list(report.tools)),
        "provider_calls": [shown(asdict(call)) for call in report.provider_calls[:MOST_SPANS]],
        "n_provider_calls": len(report.provider_calls),
        "cost": report.cost,
        "n_priced": report.n_priced,
        "spans": [
            shown(
                {
                    **as_json(span),
                    "attributes": {name: _readable(value) for name, value in span.attributes.items()},
                    "operation": span.operation,
                    "agent": span.agent,
                    "begun": began - min(begun),
                    "seconds": span.seconds,
                },
                2_000,
                SPAN_TEXT,
            )
            for span, began in zip(ordered[:MOST_SPANS], begun[:MOST_SPANS], strict=True)
        ],
        "omitted_spans": max(0, len(spans) - MOST_SPANS),
    }


def _call(report: CallReport, position: int, skipped: int, tokens: Sequence[Any]) -> dict[str, Any]:
    call = report.call
    times = {"position": position, "span_id": call.span_id, "seconds": call.seconds}
    return shown(report.facts() | times) | {
        "rewards": [shown(asdict(reward), SHORT_TEXT) for reward in report.rewards],
        "first_token": skipped,
        "n_tokens": len(report.tokens),
        # Columns: half the bytes of one object per token.
        "tokens": {
            "texts": [printable(token.text) for token in tokens],
            "ids": [token.id for token in tokens],
            "logprobs": [token.logprob if math.isfinite(token.logprob) else None for token in tokens],
            "trained": [token.trained for token in tokens],
        },
    }


def _readable(value: Any) -> Any:
    """The value of JSON that an attribute holds as text. Parsed here: on the page, escapes of control characters in it
    would become these characters."""
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    try:
        return orjson.loads(value)
    except ValueError:
        return value
