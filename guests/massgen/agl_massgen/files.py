"""Rollouts in the layout of MassGen's RL document: one JSON file per run of an agent, by date and agent, and an index.

A trace is one run of one agent: an `invoke_agent` span and what happened in it, without the runs of other agents that
lie in it, which are separate traces.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

from agl import semconv
from agl.errors import ConfigError
from agl.mdp.order import in_order
from agl.mdp.spans import Span
from agl.messages import Message, read, write
from agl.tracing.inferred import with_messages
from agl.trainer.report.export.json_files import file_name, to_json
from agl.trainer.report.export.rows import Record

TraceStatus = Literal["completed", "failed", "cancelled", "running"]
"""The status of a trace: "cancelled" was closed before its end; "running" also of a process that was killed."""

STATUS = "agl.massgen.status"
STAGE = "agl.massgen.stage"
AGENT = "agl.massgen.agent"
TASK = "agl.massgen.task"
"""On `invoke_agent` spans: the trace's status where it was cancelled, the stage of the coordination that asked for the
run, the agent where the span carries another name, and the text that the agent was sent."""


@dataclass(frozen=True, kw_only=True)
class TraceSpan:
    """One thing that happened in a trace. `timestamp`: when it began, in seconds since the epoch."""

    span_type: ClassVar[str]
    timestamp: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"span_type": self.span_type, **asdict(self)}


@dataclass(frozen=True)
class PromptSpan(TraceSpan):
    """A call of a model. `input`: the messages, or a text; `error`: why it failed."""

    span_type: ClassVar[str] = "prompt"
    input: Any
    output: str
    model: str
    error: str | None = None


@dataclass(frozen=True)
class ToolSpan(TraceSpan):
    """A tool call. `result`: None where the agent's orchestrator carries it out, as it does a vote; `error`: why it
    failed."""

    span_type: ClassVar[str] = "tool"
    tool_name: str
    arguments: Any
    result: Any = None
    error: str | None = None


@dataclass(frozen=True)
class RewardSpan(TraceSpan):
    """A reward. `reward_type`: "tool", "answer_quality", "coordination", "voting", "human", or the name of another
    reward; `agent_id`: who earned it, if not the trace's agent."""

    span_type: ClassVar[str] = "reward"
    reward: float
    reward_type: str
    reason: str = ""
    agent_id: str | None = None


@dataclass(frozen=True)
class CoordinationSpan(TraceSpan):
    """An event of the coordination.

    Attributes:
        event_type: "answer", "vote", "restart", "winner", "final_answer", or the orchestrator's name for another.
        agent_id: the agent.
        voted_for: the agent that a vote is for, by its own id.
        reason: of a vote.
        round: from 0.
        details: in words.
    """

    span_type: ClassVar[str] = "coordination"
    event_type: str
    agent_id: str | None = None
    voted_for: str | None = None
    reason: str = ""
    round: int | None = None
    details: str = ""


@dataclass(frozen=True)
class ContentSpan(TraceSpan):
    """Text that an agent generated. `partial`: the run was closed in the middle of it."""

    span_type: ClassVar[str] = "content"
    content: str
    partial: bool = False


@dataclass(frozen=True)
class ReasoningSpan(TraceSpan):
    """Reasoning that an agent's model showed."""

    span_type: ClassVar[str] = "reasoning"
    content: str


_TYPES = {c.span_type: c for c in (PromptSpan, ToolSpan, RewardSpan, CoordinationSpan, ContentSpan, ReasoningSpan)}


def span_from_json(value: Mapping[str, Any]) -> TraceSpan:
    """The span that `TraceSpan.to_json` wrote; fields that it does not know are left out.

    Raises:
        ConfigError: it is no span, or lacks a field.
    """
    cls = _TYPES.get(str(value.get("span_type")))
    if cls is None:
        raise ConfigError(f"there is no span_type {value.get('span_type')!r}", hint=f"there are {', '.join(_TYPES)}")
    known = {f.name for f in fields(cls)}
    try:
        return cls(**{k: v for k, v in value.items() if k in known})
    except TypeError as error:
        raise ConfigError(f"a {cls.span_type} span lacks a field: {error}") from error


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of one agent.

    Attributes:
        trace_id: unique; holds the rollout's id.
        agent_id: the agent.
        task: what the rollout was asked.
        spans: in order of time.
        total_reward: the sum of the rewards that count.
        start_time, end_time: seconds since the epoch; None where unknown.
        metadata: `rollout_id`, `stage` and what else is known, as JSON values.
    """

    trace_id: str
    agent_id: str
    task: str
    spans: tuple[TraceSpan, ...] = ()
    total_reward: float = 0.0
    status: TraceStatus = "completed"
    start_time: float | None = None
    end_time: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"spans": [span.to_json() for span in self.spans], "metadata": dict(self.metadata)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Trace:
        """The trace that `to_json` wrote, or another program in this format.

        Raises:
            ConfigError: it is no trace.
        """
        known = {f.name for f in fields(cls)}
        try:
            spans: Any = tuple(map(span_from_json, value["spans"]))
            return cls(**{**{k: v for k, v in value.items() if k in known}, "spans": spans})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is not a trace: {type(error).__name__}: {error}") from error

    @property
    def path(self) -> Path:
        """Where its file lies in a folder of traces."""
        date = datetime.fromtimestamp(self.start_time or 0.0, UTC).strftime("%Y%m%d")
        return Path("traces") / date / file_name(self.agent_id) / f"{file_name(self.trace_id)}.json"


def trace_id(rollout_id: str, span_id: str | None) -> str:
    """The id of the trace of an `invoke_agent` span; None for the outermost one."""
    return f"trace_{rollout_id}" + ("" if span_id is None else f"_{span_id}")


def traces(record: Record) -> list[Trace]:
    """The traces of a rollout's last attempt, in order of start."""
    last = max((s.attempt for s in record.spans), default=0)
    spans = with_messages(
        [s for s in record.spans if s.attempt == last], [c for c in record.calls if c.attempt == last]
    )
    by_id = {s.span_id: s for s in spans}
    members: defaultdict[str | None, list[Span]] = defaultdict(list)
    for span in spans:
        if span.operation != semconv.INVOKE_AGENT:
            members[_run_of(span, by_id)].append(span)
    runs = [s for s in in_order(spans) if s.operation == semconv.INVOKE_AGENT]
    made = [_trace(record, run, members.get(run.span_id, ())) for run in runs]
    if members.get(None):
        # The outermost run has not ended: it is still running, or its process was killed.
        made.insert(0, _trace(record, None, members[None]))
    return made


def _run_of(span: Span, by_id: Mapping[str, Span]) -> str | None:
    parent = by_id.get(span.parent_id or "")
    while parent is not None and parent.operation != semconv.INVOKE_AGENT:
        parent = by_id.get(parent.parent_id or "")
    return None if parent is None else parent.span_id


def _trace(record: Record, run: Span | None, members: Iterable[Span]) -> Trace:
    rollout = record.rollout
    facts = run.attributes if run is not None else {}
    ordered = in_order(members)
    spans = tuple(made for s in ordered if (made := _span(s, run)) is not None)
    counted = (
        float(s.attributes[semconv.REWARD_VALUE])
        for s in ordered
        if s.operation == semconv.REWARD and s.attributes.get(semconv.REWARD_PRIMARY, True)
    )
    agent = facts.get(AGENT) or (run.agent if run is not None else rollout.metadata.get("agent")) or "agent"
    outermost = run is None or run.parent_id is None
    status: Any = facts.get(STATUS)
    if run is None:
        status = "running" if rollout.ended_at is None else "failed"
    elif status is None:
        status = "failed" if run.status == "error" else "completed"
    about = {"rollout_id": rollout.rollout_id, "stage": facts.get(STAGE), "input": facts.get(TASK)}
    if run is not None and run.status_message:
        about["error"] = run.status_message
    return Trace(
        trace_id(rollout.rollout_id, None if outermost or run is None else run.span_id),
        str(agent),
        rollout.task if isinstance(rollout.task, str) else to_json(rollout.task).decode(),
        spans,
        sum(counted),
        status,
        rollout.created_at if run is None else run.start,
        None if run is None else run.end,
        {name: value for name, value in about.items() if value is not None},
    )


def _span(span: Span, run: Span | None) -> TraceSpan | None:
    facts = span.attributes
    at = span.start
    error = (span.status_message or "error") if span.status == "error" else None
    match span.operation:
        case semconv.CHAT:
            model = str(facts.get(semconv.RESPONSE_MODEL) or facts.get(semconv.REQUEST_MODEL) or "")
            sent = write.to_openai(read.sent(span), text_only=False) or None
            return PromptSpan(sent, _answer(read.said(span)), model, error, timestamp=at)
        case semconv.EXECUTE_TOOL:
            arguments, result = (_json(facts.get(k)) for k in (semconv.TOOL_CALL_ARGUMENTS, semconv.TOOL_CALL_RESULT))
            return ToolSpan(str(facts.get(semconv.TOOL_NAME, "")), arguments, result, error, timestamp=at)
        case semconv.REWARD:
            earner = facts.get(semconv.REWARD_AGENT)
            other = None if run is not None and earner == run.agent else earner
            value = float(facts[semconv.REWARD_VALUE])
            name = str(facts.get(semconv.REWARD_NAME, "reward"))
            return RewardSpan(value, name, str(facts.get(semconv.VALUE, "")), other, timestamp=at)
        case semconv.OBJECT:
            value = _json(facts.get(semconv.VALUE))
            if isinstance(value, Mapping) and value.get("span_type") in _TYPES:
                return span_from_json({**value, "timestamp": at})
        case semconv.MESSAGE:
            return ContentSpan(str(facts.get(semconv.VALUE, "")), timestamp=at)
    return None


def _json(text: Any) -> Any:
    """The value of a JSON text; other text unchanged."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _answer(messages: Iterable[Message]) -> str:
    """A model's answer: its texts, and its tool calls as JSON."""
    parts: list[str] = []
    for message in messages:
        calls = ({"name": c.name, "arguments": c.arguments} for c in message.tool_calls)
        parts += [*([message.text] if message.text else []), *(json.dumps(c, ensure_ascii=False) for c in calls)]
    return "\n".join(parts)


class MassGenFiles:
    """Writes `traces/YYYYMMDD/<agent>/trace_<id>.json` and, when it is closed, `metadata/trace_index.json`; dates of
    the traces' start, UTC.

    Args:
        folder: of the files.
        tokens: such files have none, whichever it is.
    """

    def __init__(self, folder: Path, *, tokens: bool = False) -> None:
        self._folder = folder
        self._index: dict[str, Any] = {}

    def add(self, record: Record) -> None:
        """Write the traces of a rollout."""
        for trace in traces(record):
            file = self._folder / trace.path
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, trace.to_json())
            self._index[trace.trace_id] = {
                "path": trace.path.as_posix(),
                **{name: getattr(trace, name) for name in ("agent_id", "task", "status", "total_reward", "start_time")},
            }

    def continue_index(self) -> None:
        """Keep the entries of an index that is there."""
        try:
            self._index = json.loads((self._folder / INDEX).read_text(encoding="utf-8"))["traces"] | self._index
        except (OSError, ValueError, KeyError):
            pass  # none, or one that is made anew

    def write_index(self) -> None:
        """Write the index of the traces so far."""
        (self._folder / INDEX).parent.mkdir(parents=True, exist_ok=True)
        _write(self._folder / INDEX, {"traces": self._index})

    def close(self) -> None:
        """Write the index."""
        self.write_index()


INDEX = Path("metadata") / "trace_index.json"


def _write(file: Path, value: Any) -> None:
    # A reader never sees half a file.
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(to_json(value, indent=True) + b"\n")
    partial.replace(file)


def read_traces(folder: str | Path, *, agent_id: str | None = None, date: str | None = None) -> Iterator[Trace]:
    """The traces of a folder that was written in this layout, by agl or another program, by date and agent.

    Args:
        agent_id: of this agent alone.
        date: of this day alone, "YYYYMMDD".

    Raises:
        ConfigError: there is no folder of traces, or a file that holds none.
    """
    place = Path(folder) / "traces"
    if not place.is_dir():
        raise ConfigError("there is no folder of traces", hint="name the one that has traces/ in it", path=place)
    for file in sorted(place.glob(f"{date or '*'}/{'*' if agent_id is None else file_name(agent_id)}/*.json")):
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"this file is not JSON: {error}", path=file) from error
        yield Trace.from_json(value)
