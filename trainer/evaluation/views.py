"""An evaluation as a table on the terminal, as Markdown, and as HTML that loads nothing and runs nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.table import Table

from agl.trainer.evaluation.comparison import Comparison, Flip
from agl.trainer.evaluation.policy_report import Estimate, EvaluatedRollout, PolicyReport
from agl.trainer.report import terminal
from agl.trainer.report.markup import document, styled, table, text
from agl.trainer.report.prices import dollars

SHOWN_FLIPS = 50
"""How many tasks that flipped an HTML report shows in each direction."""
_TASK = 1_000
_SUMMARY = 120


class Evaluated(Protocol):
    """An `agl.trainer.evaluation.evaluation.Evaluation`, as far as it is shown."""

    @property
    def tasks(self) -> Mapping[int, Any]: ...

    @property
    def policies(self) -> Mapping[str, PolicyReport]: ...

    @property
    def success(self) -> str: ...

    @property
    def store(self) -> str: ...

    def comparisons(self) -> Sequence[Comparison]: ...

    def rollout(self, rollout_id: str) -> EvaluatedRollout: ...


def print_table(evaluation: Evaluated) -> None:
    """Print the numbers, and how the first policy differs from the others."""
    console = terminal.console()
    header, rows = grid(evaluation)
    shown = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    for comparison in evaluation.comparisons():
        console.print()
        for sentence in sentences(comparison):
            console.print(sentence)


def grid(evaluation: Evaluated) -> tuple[list[str], list[list[str]]]:
    """The numbers as a table of texts: a column per policy; rows that would be empty are left out."""
    policies = list(evaluation.policies.values())
    ks = [k for k in policies[0].pass_at if all(k in p.pass_at for p in policies) and k > 1]
    rewards = sorted({name for p in policies for name in p.rewards if len(p.rewards) > 1 or name != "reward"})
    agents = sorted({name for p in policies for name in p.agents if len(p.agents) > 1})
    failing = any(p.failed for p in policies)

    def row(name: str, value: object) -> list[str]:
        return [name, *(value(p) for p in policies)]  # type: ignore[operator]

    rows = [row("success", lambda p: percentages(p.success))]
    if failing:
        rows.append(row("  counting failed rollouts as 0 or 1", lambda p: _range(p.success_bounds)))
    rows += [row(f"pass@{k}", lambda p, k=k: _range(p.pass_at[k])) for k in ks]
    rows += [row(f"pass^{k}", lambda p, k=k: _range(p.pass_hat[k])) for k in ks]
    rows.append(row("mean reward", lambda p: _interval(p.reward)))
    rows += [row(f"  {name}", lambda p, n=name: _interval(p.rewards[n]) if n in p.rewards else "") for name in rewards]
    rows.append(row("tasks x samples", lambda p: f"{p.tasks} x {p.samples}"))
    if failing:
        rows.append(row("failed rollouts", lambda p: f"{p.failed} of {len(p.rollouts)}"))
        for cause in dict.fromkeys(cause for p in policies for cause in p.failures):
            rows.append(row(f"  {_cut(cause, 80)}", lambda p, c=cause: str(p.failures.get(c, 0))))
    for key, name in (("calls", "calls"), ("tokens", "sampled tokens"), ("tools", "tools"), ("seconds", "seconds")):
        rows.append(row(f"{name} per rollout", lambda p, key=key: _number(p.means[key])))
    if any("cost_usd" in p.means for p in policies):
        cost = "cost_usd"
        rows.append(row("cost per rollout", lambda p: dollars(p.means[cost]) if cost in p.means else ""))
    for agent in agents:
        rows.append(row(f"  {agent}", lambda p, a=agent: _agent(p.agents.get(a, {}))))
    for key in ("model", "fingerprint", "temperature", "max_response_tokens", "seed", "agl"):
        if any(p.ran.get(key) is not None for p in policies):
            rows.append(row(key, lambda p, key=key: "" if p.ran.get(key) is None else str(p.ran[key])))
    return ["", *(p.name for p in policies)], rows


def sentences(comparison: Comparison) -> list[str]:
    """A comparison in words."""
    c = comparison
    verdict = f"{'' if c.significant else 'not '}statistically significant (paired sign-flip test, p {_p(c.success_p)})"
    gain = _with_bounds(c.success, "+.1f", " points", 100)
    smallest = (
        f"minimum detectable difference {100 * c.smallest_difference:.1f} points at 80 % power"
        if math.isfinite(c.smallest_difference)
        else "one task allows no conclusion about others"
    )
    return [
        f"{c.before} -> {c.after}: success {gain}, {verdict}",
        f"  n = {c.tasks} tasks; {smallest}",
        f"  reward {_interval(c.reward, sign='+')}, p {_p(c.reward_p)}",
        f"  solved in most samples: {_count(c.gained)} by {c.after} only, {_count(c.lost)} by {c.before} only",
    ]


def markdown(evaluation: Evaluated) -> str:
    """The same table and sentences as Markdown."""
    header, rows = grid(evaluation)
    lines = ["# Evaluation", "", f"A success is a {evaluation.success}.", ""]
    lines += [_markdown_row(header), _markdown_row(["---"] * len(header)), *map(_markdown_row, rows)]
    for comparison in evaluation.comparisons():
        lines += ["", *(f"- {_escaped(s.strip())}" for s in sentences(comparison))]
        for flips, policy in ((comparison.gained, comparison.after), (comparison.lost, comparison.before)):
            for flip in flips[:SHOWN_FLIPS]:
                ids = " and ".join(f"`{rollout}`" for rollout in flip.rollouts)
                lines.append(f"  - only {_escaped(policy)} solves, in most samples, task {flip.task}: {ids}")
    return "\n".join(lines) + "\n"


def page(evaluation: Evaluated) -> str:
    """A whole HTML file."""
    return document("agl: evaluation", fragment(evaluation))


def fragment(evaluation: Evaluated) -> str:
    """The report as HTML for within a page, with its style."""
    header, rows = grid(evaluation)
    parts = [
        "<h1>Evaluation</h1>",
        f"<p>{len(evaluation.tasks)} tasks; a success is a {text(evaluation.success)}. Intervals: 95 %, clustered by "
        f"task. Rollouts: <code>{text(evaluation.store)}</code></p>",
        table(header, rows),
        "<h2>Task by task</h2>",
        *(_strip(policy, evaluation) for policy in evaluation.policies.values()),
        '<p><i class="s0"></i> never &ensp; <i class="s1"></i><i class="s2"></i><i class="s3"></i> partly &ensp; '
        '<i class="s4"></i> always solved &ensp; <i class="sf"></i> all rollouts failed</p>',
    ]
    for comparison in evaluation.comparisons():
        first, *others = sentences(comparison)
        parts.append(f"<h2>{text(first)}</h2><ul>{''.join(f'<li>{text(s.strip())}</li>' for s in others)}</ul>")
        for flips, policy in ((comparison.gained, comparison.after), (comparison.lost, comparison.before)):
            if flips:
                parts.append(f"<h3>{_count(flips)} solved in most samples by {text(policy)} only</h3>")
                parts += [_flip(flip, comparison, evaluation) for flip in flips[:SHOWN_FLIPS]]
            if len(flips) > SHOWN_FLIPS:
                parts.append(f'<p class="note">and {len(flips) - SHOWN_FLIPS} more, in the JSON report</p>')
    return styled("".join(parts), _STYLE)


def _strip(policy: PolicyReport, evaluation: Evaluated) -> str:
    """A square per task, coloured by its success rate."""
    cells = []
    by_task = policy.by_task()
    for task in evaluation.tasks:
        rows = by_task.get(task, [])
        ended = [r for r in rows if r.error is None]
        solved = sum(r.success is True for r in ended)
        shade = round(4 * solved / len(ended)) if ended else "f"
        if ended and 0 < solved < len(ended):
            shade = min(3, max(1, int(shade)))
        cells.append(f'<i class="s{shade}" title="task {task}: {solved} of {len(rows)}"></i>')
    return f'<p class="strip"><b>{text(policy.name)}</b> {"".join(cells)}</p>'


def _flip(flip: Flip, comparison: Comparison, evaluation: Evaluated) -> str:
    task = json.dumps(evaluation.tasks.get(flip.task), ensure_ascii=False, default=str)
    sides = []
    for name, rate, rollout_id in zip(
        (comparison.before, comparison.after), (flip.before, flip.after), flip.rollouts, strict=True
    ):
        rollout = evaluation.rollout(rollout_id)
        sides.append(
            f"<div><b>{text(name)}</b>: {100 * rate:.0f} % solved, <code>{text(rollout_id)}</code>, reward "
            f"{text(_number(rollout.reward or 0.0))}<pre>{text(rollout.transcript)}</pre></div>"
        )
    whole = f"<pre>{text(_cut(task, _TASK))}</pre>" if len(task) > _SUMMARY else ""
    return (
        f"<details><summary>task {flip.task}: {text(_cut(task, _SUMMARY))}</summary>{whole}"
        f'<div class="sides">{"".join(sides)}</div></details>'
    )


_STYLE = """
.agl i { display: inline-block; width: 10px; height: 10px; margin: 0 1px 1px 0; border-radius: 2px }
.agl .strip { line-height: 11px; max-width: 70em } .agl .strip b { display: block; line-height: 1.6 }
.agl .s0 { background: #b3372f } .agl .s1 { background: #d98c4a } .agl .s2 { background: #d9c24a }
.agl .s3 { background: #8fb85a } .agl .s4 { background: #2f8f4e }
.agl .sf { background: repeating-linear-gradient(45deg, #888 0 2px, transparent 2px 4px) }
.agl .sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(20em, 1fr)); gap: 1em }
"""


def percentages(estimate: Estimate) -> str:
    """`62.5 % [52.1, 71.9]`; without an interval, "-"."""
    return _with_bounds(estimate, ".1f", " %", 100)


def _interval(estimate: Estimate, sign: str = "") -> str:
    return _with_bounds(estimate, f"{sign}.3f")


def _with_bounds(estimate: Estimate, form: str, unit: str = "", scale: float = 1.0) -> str:
    if math.isnan(estimate.value):
        return "-"
    value, low, high = (format(scale * x, form) for x in (estimate.value, estimate.low, estimate.high))
    return f"{value}{unit} [{low}, {high}]" if math.isfinite(estimate.low) else f"{value}{unit}"


def _range(bounds: tuple[float, float]) -> str:
    low, high = (f"{100 * b:.1f}" for b in bounds)
    return f"{low} %" if low == high else f"{low} to {high} %"


def _agent(numbers: Mapping[str, float]) -> str:
    parts = [f"{_number(numbers[key])} {key}" for key in ("calls", "tokens") if key in numbers]
    return ", ".join([*parts, *([f"reward {numbers['reward']:.3f}"] if "reward" in numbers else [])])


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _p(value: float) -> str:
    return f"= {value:.3f}" if value >= 0.001 else "< 0.001"


def _count(flips: Sequence[Flip]) -> str:
    return f"{len(flips)} task{'' if len(flips) == 1 else 's'}"


def _cut(value: str, length: int) -> str:
    return value if len(value) <= length else f"{value[: length - 1]}…"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escaped(cell.strip()) for cell in cells)} |"


def _escaped(value: str) -> str:
    from agl.texts import printable

    value = printable(value.replace("\n", " "))
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#&" else c for c in value)
