"""Say exactly what was trained in a rollout: calls, tokens, rewards, returns, advantages, rows, and why any forked."""

from __future__ import annotations

import io
import os
import time
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agl import semconv
from agl.credit import Credit, Uniform, returns
from agl.errors import StoreError
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import Selection
from agl.mdp.sequence import merge
from agl.mdp.span_index import SpanIndex
from agl.mdp.types import Call
from agl.trainer.store import open_store
from agl.trainer.store.base import Attempt, Rollout, Store
from agl.trainer.store.collect import DEFAULT_STORE


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A sampled token: its text, id, behaviour log-prob, and whether it was trained."""

    text: str
    id: int
    logprob: float
    trained: bool


@dataclass(frozen=True, slots=True)
class CallReport:
    """One LLM call.

    Attributes:
        id, index, agent, policy, policy_version, finish_reason, temperature: of the call; `policy` None = not trained.
        prompt_tokens: P; continued: how many of them are an earlier call's, token for token; parent: which.
        fork: cause and detail, if the conversation went on but could not be continued.
        messages: the new messages of the request; reply: the assistant message.
        tokens: the sampled tokens.
        rewards: this call's own. return_, advantage, step, sequence, dropped: what training made of it, if it was.
    """

    id: str
    index: int
    agent: str
    policy: str | None
    policy_version: int
    finish_reason: str
    temperature: float
    prompt_tokens: int
    continued: int
    parent: str | None
    fork: str | None
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    tokens: list[TokenReport]
    rewards: list[dict[str, Any]]
    return_: float | None
    advantage: float | None
    step: int | None
    sequence: int | None
    dropped: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class RowReport:
    """A merged row: the policy that it trains, the calls in it (by index), its tokens, how many of them are trained,
    and whether it branches."""

    policy: str
    calls: list[int]
    tokens: int
    trained: int
    unmerged_tokens: int
    is_chain: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What `explain` knows of a rollout. `attempts` are (number, status, error); `rewards` the rollout's own;
    `collected` counts the calls that other models answered, of which no tokens are known."""

    rollout_id: str
    status: str
    mode: str
    step: int | None
    task: Any
    output: str | None
    attempts: list[dict[str, Any]]
    rewards: list[dict[str, Any]]
    total_reward: float | None
    calls: list[CallReport]
    rows: list[RowReport]
    tools: list[dict[str, Any]]
    collected: int = 0

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


async def describe(
    store: Store, rollout_id: str, *, attempt: int | None = None, credit: Credit | None = None
) -> Report:
    """The report on a rollout's last attempt, or the one asked for.

    Raises:
        StoreError: no such rollout or attempt.
    """
    rollout = await store.get_rollout(rollout_id)
    attempts = await store.query_attempts(rollout.rollout_id)
    if not attempts:
        raise StoreError("the rollout has not been tried yet", rollout=rollout.rollout_id)
    chosen = _attempt(attempts, attempt, rollout)
    calls = await store.query_calls(rollout.rollout_id, chosen.attempt)
    spans = await store.query_spans(rollout.rollout_id, chosen.attempt)
    trained = {t.call_id: t for t in await store.query_trained_calls(rollout.rollout_id)}
    everyone = Selection(tuple((c.agent, c.policy) for c in calls if c.policy is not None))
    built = build_trajectory(rollout.rollout_id, chosen.attempt, rollout.group, SpanIndex(calls, spans), everyone)
    whole = built.trajectory
    # A rule is about the whole rollout, whatever the policies: one that compares agents needs all of them. What an
    # attempt that failed earned is never credited.
    credited = returns(credit or Uniform(), whole) if chosen.status == "succeeded" else [None] * len(whole.transitions)
    value = {t.call.id: r for t, r in zip(whole.transitions, credited, strict=True)}
    rows: list[RowReport] = []
    index = {c.id: c.index for c in calls}
    by_id = {c.id: c for c in calls}
    for policy, trajectory in built.trajectories.items():
        for row in merge(trajectory, dict.fromkeys((t.call.id for t in trajectory.transitions), 0.0)):
            unmerged = sum(by_id[c].ids.size for c in row.call_ids)
            merged = [index[c] for c in row.call_ids]
            rows.append(RowReport(policy, merged, len(row), row.n_actions, unmerged, row.is_chain))
    trainable = {t.call.id: t.trainable for t in whole.transitions}
    decoders = {policy: _decoder(rollout, policy) for policy in {c.policy for c in calls}}
    rewards = [(asdict(r), call_id) for r, call_id in built.credited]
    reports = []
    for call in calls:
        record = trained.get(call.id)
        fork = call.fork_cause
        if fork and call.request.get("fork_detail"):
            fork = f"{fork}: {call.request['fork_detail']}"
        kept = trainable.get(call.id, False) and (record is None or record.dropped is None)
        reports.append(
            CallReport(
                call.id, call.index, call.agent, call.policy, call.policy_version, call.finish_reason,
                call.temperature, call.prompt_ids.size, _continued(call, by_id), call.parent_id, fork,
                list(call.request.get("messages", [])), dict(call.response),
                [
                    TokenReport(decoders[call.policy](i), i, lp, kept)
                    for i, lp in zip(call.response_ids.tolist(), call.logprobs.tolist(), strict=True)
                ],
                [r for r, call_id in rewards if call_id == call.id],
                record.return_ if record else value.get(call.id),
                record.advantage if record else None,
                record.step if record else None,
                record.sequence if record else None,
                record.dropped if record else None,
                call.error,
            )
        )  # fmt: skip
    tools = [
        {
            "name": s.attributes.get(semconv.TOOL_NAME), "tool_call_id": s.attributes.get(semconv.TOOL_CALL_ID),
            "arguments": s.attributes.get(semconv.TOOL_CALL_ARGUMENTS),
            "result": s.attributes.get(semconv.TOOL_CALL_RESULT), "status": s.status, "error": s.status_message,
        }
        for s in spans if s.operation == semconv.EXECUTE_TOOL
    ]  # fmt: skip
    root = next((s for s in spans if s.parent_id is None), None)
    output = root.attributes.get("agl.output") if root else None
    return Report(
        rollout.rollout_id, rollout.status, rollout.mode, rollout.step, rollout.task,
        None if output is None else str(output),
        [{"attempt": a.attempt, "status": a.status, "error": a.error} for a in attempts],
        [r for r, call_id in rewards if call_id is None], built.reward, reports, rows, tools,
        sum(s.operation == semconv.CHAT and s.span_id not in {c.span_id for c in calls} for s in spans),
    )  # fmt: skip


def explain(rollout_id: str, store: str | Path | None = None, *, attempt: int | None = None) -> Report:
    """Print what was trained in a rollout, and return it.

    Args:
        rollout_id: or a unique beginning of it.
        store: URL or path of the store; that of the newest run below ./agl-runs if None.
        attempt: which one; the last if None.

    Raises:
        StoreError: no such store, rollout or attempt.
    """
    from agl.trainer.http.aio import run_in_thread

    async def main() -> Report:
        opened = await open_store(find_store(store))
        try:
            return await describe(opened, rollout_id, attempt=attempt)
        finally:
            await opened.close()

    report = run_in_thread(main())
    Console(highlight=False).print(renderable(report))
    return report


def find_store(store: str | Path | None) -> str:
    """The URL of an existing store.

    Raises:
        StoreError: there is none at that path, or no run below ./agl-*.
    """
    store = store or os.environ.get("AGL_STORE")
    if store is None:
        patterns = ("agl-*/run.db", "agl-*/*/run.db", DEFAULT_STORE)
        found = sorted((p for pattern in patterns for p in Path().glob(pattern)), key=_changed)
        if not found:
            raise StoreError("there is no run below this directory", hint="name its store with --store PATH")
        return f"sqlite:///{found[-1]}"
    text = str(store)
    path = Path(text.removeprefix("sqlite:///"))
    if "://" not in text.removeprefix("sqlite:///"):
        if path.is_dir():
            path = path / "run.db"
        if not path.exists():
            raise StoreError("there is no store at this path", hint="it is the run.db in a run's directory", path=path)
        return f"sqlite:///{path}"
    return text


def _changed(path: Path) -> float:
    """When a store was last written to; what is new is in its log first."""
    log = path.with_name(f"{path.name}-wal")
    return max(p.stat().st_mtime for p in (path, log) if p.exists())


def _attempt(attempts: list[Attempt], number: int | None, rollout: Rollout) -> Attempt:
    if number is None:
        return attempts[-1]
    for attempt in attempts:
        if attempt.attempt == number:
            return attempt
    raise StoreError(
        f"the rollout has attempts {', '.join(str(a.attempt) for a in attempts)}, not {number}",
        rollout=rollout.rollout_id,
    )


def _continued(call: Call, calls: dict[str, Call]) -> int:
    parent = calls.get(call.parent_id or "")
    return 0 if parent is None else parent.ids.size


def _decoder(rollout: Rollout, policy: str | None) -> Any:
    """id -> text, by the tokenizer of the policy's model; `<id>` where it is not at hand."""
    models = rollout.metadata.get("models") or {}
    path = Path(str(models.get(policy, rollout.metadata.get("model", "")))) / "tokenizer.json"
    if not path.is_file():
        return lambda i: f"<{i}>"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda i: tokenizer.decode([i], skip_special_tokens=False)


_STEERING = frozenset({"Cc", "Cf", "Zl", "Zp"})
"""Unicode's categories of characters that are not seen but move, hide or turn what is."""

# -- how it looks -----------------------------------------------------------------------------------------------------


def render(report: Report, width: int = 110) -> str:
    """The report as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(renderable(report))
    return out.getvalue().rstrip()


def renderable(report: Report) -> Group:
    """The report as rich shows it."""
    head = Text.assemble(
        ("rollout ", "bold"), (report.rollout_id, "cyan"), f"  {report.status}  {report.mode}",
        f"  step {report.step + 1}" if report.step is not None and report.mode == "train" else "",
    )  # fmt: skip
    lines: list[Any] = [head, Text(_plain(f"task      {report.task}"))]
    if report.output is not None:
        lines.append(Text(_plain(f"output    {report.output}")))
    if report.total_reward is not None:
        own = ", ".join(map(_reward, report.rewards)) or "none"
        lines.append(Text(f"reward    {report.total_reward:g}   of the whole rollout: {own}"))
    for attempt in report.attempts:
        if attempt["error"]:
            last = attempt["error"].strip().splitlines()
            lines.append(Text(_plain(f"attempt {attempt['attempt']} {attempt['status']}: {last[-1]}"), style="red"))
    lines += [_call_panel(c, report) for c in report.calls]
    if report.collected:
        what = "calls were" if report.collected > 1 else "call was"
        lines.append(
            Text(
                f"{report.collected} {what} answered by another model than a policy, so there are no token ids and "
                f"nothing to train; what was said: agl trace show {report.rollout_id}",
                style="yellow",
            )
        )
    if report.rows:
        table = Table(title="training rows", title_justify="left", box=None, pad_edge=False)
        for column in ("policy", "calls merged", "tokens", "trained", "tokens if unmerged", "shape"):
            table.add_column(column, justify="left" if column in ("policy", "calls merged") else "right")
        for row in report.rows:
            table.add_row(
                row.policy, " + ".join(map(str, row.calls)), str(row.tokens), str(row.trained),
                str(row.unmerged_tokens), "chain" if row.is_chain else "tree",
            )  # fmt: skip
        lines.append(table)
    return Group(*lines)


def _call_panel(call: CallReport, report: Report) -> Panel:
    title = f"call {call.index}  agent {call.agent}  " + (
        f"policy {call.policy} v{call.policy_version}" if call.policy else "not trained"
    )
    body: list[Any] = []
    for message in call.messages:
        body.append(Text.assemble((f"{message.get('role', '?'):<10}", "dim"), _plain(_said(message))))
    answer = Text("sampled   ", style="dim")
    for token in call.tokens:
        answer.append(_plain(token.text.replace("\n", "⏎")), style="green" if token.trained else "dim")
    body.append(answer)
    if call.tokens:
        # A log-prob of -0.001 is shown as 0.00, not as -0.00.
        logprobs = " ".join(f"{t.logprob:.2f}".replace("-0.00", "0.00") for t in call.tokens[:24])
        body.append(Text(f"log-probs {logprobs}{' ...' if len(call.tokens) > 24 else ''}", style="dim"))
    for tool_call in call.reply.get("tool_calls") or ():
        result = next((t for t in report.tools if t["tool_call_id"] == tool_call["id"]), None)
        function = tool_call["function"]
        shown = "" if result is None else f" -> {result['result'] if result['status'] != 'error' else result['error']}"
        body.append(Text(_plain(f"tool      {function['name']}({function['arguments']}){shown}")))
    continued = f", {call.continued} continued from call before" if call.continued else ""
    facts = f"{call.prompt_tokens} prompt tokens{continued}; {len(call.tokens)} sampled; {call.finish_reason}"
    if call.temperature != 1.0:
        facts += f"; temperature {call.temperature:g}"
    body.append(Text(facts, style="dim"))
    if call.fork:
        body.append(Text(f"forked    {call.fork}", style="yellow"))
    if call.error:
        body.append(Text(_plain(f"error     {call.error}"), style="red"))
    if call.rewards:
        body.append(Text(f"rewards   {', '.join(map(_reward, call.rewards))}", style="bold"))
    if call.return_ is not None:
        numbers = f"return    {call.return_:g}"
        if call.advantage is not None:
            numbers += f"   advantage {call.advantage:+.3f}"
        body.append(Text(numbers, style="bold"))
    if call.step is not None:
        tokens = sum(t.trained for t in call.tokens)
        row = f", row {call.sequence} of its policy's batch" if call.sequence is not None else ""
        body.append(Text(f"trained   {tokens} tokens in step {call.step}{row}", style="bold"))
    if call.dropped:
        body.append(Text(f"not trained: {call.dropped}", style="bold"))
    return Panel(Group(*body), title=title, title_align="left", border_style="green" if call.policy else "dim")


def _reward(reward: dict[str, Any]) -> str:
    notes = [reward["source"]]
    if reward["agent"] is not None:
        notes.append(f"for {reward['agent']} alone")
    if not reward["primary"]:
        notes.append("not primary")
    return f"{reward['name']} {reward['value']:g} ({', '.join(notes)})"


def _plain(text: str) -> str:
    """Without what would steer the terminal: a control character is shown as its escape, line breaks and tabs stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _STEERING else ascii(c)[1:-1] for c in text)


def _said(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else str(content)
    calls = ", ".join(c["function"]["name"] for c in message.get("tool_calls") or ())
    return f"{text} [{calls}]" if calls else text


def list_rollouts(store: str | Path | None = None, limit: int = 40) -> list[dict[str, Any]]:
    """Print the newest rollouts of a store, and return them (all of them) as JSON values.

    Raises:
        StoreError: no such store.
    """
    from agl.trainer.http.aio import run_in_thread

    async def main() -> list[Rollout]:
        opened = await open_store(find_store(store))
        try:
            return await opened.query_rollouts()
        finally:
            await opened.close()

    rollouts = run_in_thread(main())
    table = Table(box=None, pad_edge=False, expand=True)
    for column in ("rollout", "began", "took", "mode", "step", "status"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("took", "step") else "left")
    table.add_column("task", overflow="ellipsis", no_wrap=True, ratio=1)
    for r in rollouts[-limit:]:
        step = "" if r.step is None else str(r.step + 1 if r.mode == "train" else r.step)
        took = "" if r.ended_at is None else f"{r.ended_at - r.created_at:.1f} s"
        status = r.status if r.attempts < 2 else f"{r.status} ({r.attempts} attempts)"
        began = time.strftime("%m-%d %H:%M:%S", time.localtime(r.created_at))
        color = {"succeeded": "green", "failed": "red"}.get(r.status, "")
        table.add_row(r.rollout_id, began, took, r.mode, step, Text(status, style=color), Text(_task(r.task)))
    console = Console(highlight=False)
    console.print(table)
    if len(rollouts) > limit:
        console.print(f"the newest {limit} of {len(rollouts)} rollouts", style="dim")
    return [
        {"rollout_id": r.rollout_id, "mode": r.mode, "step": r.step, "status": r.status, "task": r.task,
         "attempts": r.attempts, "began": r.created_at, "ended": r.ended_at}
        for r in rollouts
    ]  # fmt: skip


def _task(task: Any) -> str:
    """A task in a line; a command as it was typed."""
    return str(task["command"] if isinstance(task, dict) and task.keys() == {"command"} else task)
