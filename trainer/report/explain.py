"""`agl explain` and `agl trace ls`: a rollout's report and the list of rollouts, as a terminal shows them."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agl.errors import ConfigError
from agl.mdp.types import Reward
from agl.texts import printable, shortened
from agl.trainer.report.prices import dollars
from agl.trainer.report.rollout_report import CallReport, ProviderCall, RolloutReport, describe
from agl.trainer.report.terminal import console
from agl.trainer.report.trace_tree import error_line
from agl.trainer.store.location import read_store
from agl.trainer.store.types import NOT_AGAIN

_SHOWN_LOGPROBS = 24
PIPED_WIDTH = 1000
"""Columns of a list that is not printed to a terminal."""


FOLDED_CALLS = 8
"""Above so many calls a report has a line for each; `calls` shows some of them whole."""


def explain(
    rollout_id: str, store: str | Path | None = None, *, attempt: int | None = None, calls: str | None = None
) -> RolloutReport:
    """Print what was trained in a rollout, and return it.

    Args:
        rollout_id: the id, or a unique prefix of it.
        store: URL or path of the store; AGL_STORE, or the store of the newest run below ./agl-*, if None.
        attempt: number of the attempt; the last one if None.
        calls: those to show whole, "3-5,8" or "all"; all of at most `FOLDED_CALLS` if None.

    Raises:
        ConfigError: `calls` is neither.
        StoreError: no such store, rollout or attempt.
    """
    chosen = None if calls is None else call_numbers(calls)
    report = read_store(store, lambda opened: describe(opened, rollout_id, attempt=attempt))
    console().print(renderable(report, chosen))
    return report


def call_numbers(text: str) -> range | set[int]:
    """The numbers of a text such as "3-5,8"; of "all" every one.

    Raises:
        ConfigError: it is no such text.
    """
    if text == "all":
        return range(1 << 31)
    found: set[int] = set()
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)):
            raise ConfigError(f"--calls is {text!r}", hint="name calls by their numbers: 3, 3-5 or 3-5,8; or all")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def list_rollouts(store: str | Path | None = None, limit: int = 40) -> list[dict[str, Any]]:
    """Print the newest rollouts of a store, and return all of them as JSON values.

    Raises:
        StoreError: no such store.
    """
    rollouts = read_store(store, lambda opened: opened.query_rollouts())
    table = Table(box=None, pad_edge=False, expand=True)
    for column in ("rollout", "began", "took", "mode", "step", "status"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("took", "step") else "left")
    table.add_column("task", overflow="ellipsis", no_wrap=True, ratio=1)
    for r in rollouts[-limit:]:
        step = "" if r.step is None else str(r.step + 1 if r.mode == "train" else r.step)
        took = "" if r.ended_at is None else f"{max(0.0, r.ended_at - r.created_at):.1f} s"
        status = r.status if r.attempts < 2 else f"{r.status} ({r.attempts} attempts)"
        started = time.strftime("%m-%d %H:%M:%S", time.localtime(r.created_at))
        color = {"succeeded": "green", "failed": "red"}.get(r.status, "")
        # Of a command only the command line.
        task = r.task["command"] if isinstance(r.task, dict) and r.task.keys() == {"command"} else r.task
        table.add_row(r.rollout_id, started, took, r.mode, step, Text(status, style=color), Text(printable(str(task))))
    out = console()
    if not out.is_terminal:  # Rows that another program reads are not cut at a screen's width.
        table.expand = False
        out.width = PIPED_WIDTH
    out.print(table)
    if len(rollouts) > limit:
        out.print(f"the newest {limit} of {len(rollouts)} rollouts", style="dim")
    names = ("rollout_id", "mode", "step", "status", "task", "attempts")
    times = ({"began": r.created_at, "ended": r.ended_at} for r in rollouts)
    return [{name: getattr(r, name) for name in names} | t for r, t in zip(rollouts, times, strict=True)]


def render(report: RolloutReport, width: int = 110) -> str:
    """The report as plain text."""
    out = io.StringIO()
    console(file=out, width=width).print(renderable(report))
    return out.getvalue().rstrip()


def renderable(report: RolloutReport, calls: Container[int] | None = None) -> Group:
    """The report for a rich console. `calls`: those that are shown whole; all of at most `FOLDED_CALLS` if None."""
    rollout = report.rollout
    head = Text.assemble(("rollout ", "bold"), (rollout.rollout_id, "cyan"), f"  {rollout.status}  {rollout.mode}")
    if rollout.step is not None and rollout.mode == "train":
        head.append(f"  step {rollout.step + 1}")
    lines: list[Any] = [head, Text(printable(f"task      {rollout.task}"))]
    if report.output is not None:
        lines.append(Text(printable(f"output    {report.output}")))
    if report.total_reward is not None:
        own = ", ".join(map(_reward, report.rewards)) or "none"
        lines.append(Text(printable(f"reward    {report.total_reward:g}   of the whole rollout: {own}")))
    if report.fault is not None:
        lines.append(Text(printable(f"ended by  {report.fault}"), style="red"))
    for attempt in report.attempts:
        if attempt.error and attempt.status != "succeeded":
            cause = error_line(attempt.error)
            lines.append(Text(printable(f"attempt {attempt.attempt} {attempt.status}: {cause}"), style="red"))
            lines += [Text(printable(line)) for line in attempt.error.splitlines() if line.startswith(NOT_AGAIN)]
    if calls is None and len(report.calls) > FOLDED_CALLS:
        calls = ()
    whole = [call for call in report.calls if calls is None or call.call.index in calls]
    if len(whole) < len(report.calls):
        lines += [
            _outline(report.calls),
            Text(f"agl explain {rollout.rollout_id} --calls 0-2 shows calls whole", "dim"),
        ]
    lines += [_panel(call, report.tools) for call in whole]
    lines += map(_provider_call, report.provider_calls)
    if report.provider_calls:
        what = "calls were" if len(report.provider_calls) > 1 else "call was"
        why = "answered by a model that is not a policy, so there are no token ids to train"
        lines.append(Text(f"{len(report.provider_calls)} {what} {why}", style="yellow"))
        if report.cost is not None:
            missing = len(report.provider_calls) - report.n_priced
            rest = f"; the price of {missing} is not known" if missing else ""
            lines.append(Text(f"cost      {dollars(report.cost)}{rest}"))
    if report.forks:
        counted = ", ".join(f"{n} {cause}" for cause, n in report.forks.items())
        lines.append(Text(printable(f"forks     {counted}"), style="yellow"))
    if report.rows:
        table = Table(title="training rows", title_justify="left", box=None, pad_edge=False)
        for column in ("policy", "calls merged", "tokens", "trained", "tokens if unmerged", "shape"):
            table.add_column(column, justify="left" if column in ("policy", "calls merged") else "right")
        for row in report.rows:
            merged = " + ".join(map(str, row.calls))
            numbers = map(str, (row.tokens, row.trained, row.unmerged_tokens))
            table.add_row(printable(row.policy), merged, *numbers, "chain" if row.is_chain else "tree")
        lines.append(table)
    return Group(*lines)


def _outline(calls: Sequence[CallReport]) -> Table:
    """A line for each call: who spoke, what was sampled, and where rewards and forks are."""
    table = Table(box=None, pad_edge=False)
    for column in ("call", "agent", "prompt", "continued", "sampled", "return", "advantage"):
        table.add_column(column, justify="left" if column == "agent" else "right", no_wrap=True)
    table.add_column("what happened", overflow="ellipsis", no_wrap=True)
    for report in calls:
        call = report.call
        names = [tool_call["function"]["name"] for tool_call in call.response.get("tool_calls") or ()]
        happened = [f"{name}()" for name in names] + [f"reward {_reward(reward)}" for reward in report.rewards]
        happened += [f"forked: {report.fork}"] if report.fork else []
        happened += [f"error: {call.error}"] if call.error else []
        happened += [f"not trained: {report.trained.dropped}"] if report.trained and report.trained.dropped else []
        numbers = (call.prompt_ids.size, report.continued, len(report.tokens))
        value = "" if report.return_ is None else f"{report.return_:g}"
        advantage = f"{report.trained.advantage:+.3f}" if report.trained else ""
        style = "yellow" if report.fork else "red" if call.error else "bold" if report.rewards else ""
        shown = Text(printable(", ".join(happened)), style=style)
        table.add_row(str(call.index), printable(call.agent or ""), *map(str, numbers), value, advantage, shown)
    return table


def _panel(report: CallReport, tools: Sequence[Mapping[str, Any]]) -> Panel:
    call = report.call
    trained = report.trained
    body: list[Text] = [_said(message) for message in report.messages]
    sampled = Text("sampled   ", style="dim")
    for token in report.tokens:
        sampled.append(printable(token.text.replace("\n", "⏎")), style="green" if token.trained else "dim")
    body.append(sampled)
    if report.tokens:
        # A log-prob of -0.001 is shown as 0.00, not as -0.00.
        logprobs = [f"{t.logprob:.2f}".replace("-0.00", "0.00") for t in report.tokens[:_SHOWN_LOGPROBS]]
        more = " ..." if len(report.tokens) > _SHOWN_LOGPROBS else ""
        body.append(Text(f"log-probs {' '.join(logprobs)}{more}", style="dim"))
    for tool_call in call.response.get("tool_calls") or ():
        function = tool_call["function"]
        text = f"tool      {function['name']}({function['arguments']})"
        tool = next((t for t in tools if t["tool_call_id"] == tool_call["id"]), None)
        if tool is not None:
            text += f" -> {tool['error'] if tool['status'] == 'error' else tool['result']}"
        body.append(Text(printable(shortened(text))))
    continued = f", {report.continued} continued from call before" if report.continued else ""
    facts = f"{call.prompt_ids.size} prompt tokens{continued}; {len(report.tokens)} sampled; {call.finish_reason}"
    if call.temperature != 1.0:
        facts += f"; temperature {call.temperature:g}"
    if call.grammar:
        facts += "; held to a JSON schema"
    body.append(Text(facts, style="dim"))
    if report.fork:
        body.append(Text(printable(f"forked    {report.fork}"), style="yellow"))
    if call.error:
        body.append(Text(printable(f"error     {call.error}"), style="red"))
    if report.rewards:
        body.append(Text(printable(f"rewards   {', '.join(map(_reward, report.rewards))}"), style="bold"))
    if report.return_ is not None:
        advantage = f"   advantage {trained.advantage:+.3f}" if trained else ""
        body.append(Text(f"return    {report.return_:g}{advantage}", style="bold"))
    if trained and trained.dropped:
        body.append(Text(f"not trained in step {trained.step}: {trained.dropped}", style="bold"))
    elif trained:
        row = f", row {trained.sequence} of its policy's batch" if trained.sequence is not None else ""
        body.append(Text(f"trained   {trained.tokens} tokens in step {trained.step}{row}", style="bold"))
    versions = " to ".join(f"v{v}" for v in dict.fromkeys([call.policy_version, call.newest_version]))
    policy = f"policy {call.policy} {versions}" if call.policy else "not trained"
    return Panel(
        Group(*body),
        title=Text(printable(f"call {call.index}  agent {call.agent}  {policy}")),
        title_align="left",
        border_style="green" if call.policy else "dim",
    )


def _said(message: Mapping[str, Any]) -> Text:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else str(content)
    if calls := ", ".join(c["function"]["name"] for c in message.get("tool_calls") or ()):
        text += f" [{calls}]"
    role = str(message.get("role", "?"))
    return Text.assemble((f"{printable(shortened(role)):<10}", "dim"), printable(shortened(text)))


def _provider_call(call: ProviderCall) -> Panel:
    body = [_said(message) for message in (*call.messages, *([call.reply] if call.reply else ()))]
    if call.error:
        body.append(Text(printable(f"error     {call.error}"), style="red"))
    price = "" if call.cost is None else f"  {dollars(call.cost)}"
    title = Text(printable(f"agent {call.agent}  {call.model or 'another model'}{price}"))
    return Panel(Group(*body), title=title, title_align="left", border_style="dim")


def _reward(reward: Reward) -> str:
    notes = [reward.source]
    if reward.agent is not None:
        notes.append(f"for {reward.agent} alone")
    if not reward.primary:
        notes.append("not primary")
    if reward.explanation is not None:
        notes.append(reward.explanation)
    return f"{reward.name} {reward.value:g} ({', '.join(notes)})"
