"""Joins the tools that a program runs by hand to the tool calls that asked for them.

A program that runs a tool itself (`tool.invoke(call["args"])`) passes it the arguments of the model's tool call without
the id. Invariant: one run of a tool is one span, and a tool call is joined to one run, or to the repeats of one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.messages import Message, read

_WORD = 4
"""Characters from which an answer is recognised within a result."""


@dataclass(frozen=True, slots=True, eq=False)
class _Issued:
    """A tool call of a model's answer.

    Attributes:
        id, name: of the tool call.
        arguments: as JSON values.
        agent: the agent that issued it.
        chat: id of the `chat` span of the answer; None for none.
        position: of that span among the spans; -1 where it is unknown.
    """

    id: str
    name: str
    arguments: Any
    agent: str
    chat: str | None
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A run of a tool whose span has no id of a tool call; `arguments` as JSON values, None where not recorded."""

    span: Span
    name: str
    arguments: Any


def joined(spans: Sequence[Span], calls: Sequence[Call] = ()) -> list[Span]:
    """The spans; a tool's span without an id gets that of the tool call with its name and arguments, and the agent that
    issued it.

    Of several such calls it is one that was issued within the same agent's or node's span, in the last answer before
    the tool ran, that no other run has. Where arguments were not recorded, the name decides.

    Args:
        spans: of one attempt, in the order in which they ended.
        calls: the gateway's, in order.
    """
    runs = [_Run(s, tool_name(s), _recorded_arguments(s)) for s in spans if _is_unjoined(s)]
    if not runs:
        return list(spans)
    matches = _Matches(spans, calls)
    matches.add(runs, lambda run, call: _is_passed(run.arguments, call.arguments))
    # A person changed the arguments, and the program changed them in the conversation.
    matches.add(runs, lambda run, call: run.arguments in matches.changed(call))
    # The program adds arguments that the model does not know.
    matches.add(runs, lambda run, call: _extends(run.arguments, call.arguments))
    matches.add(runs, lambda run, call: run.arguments is None)
    # The program passes other arguments, as numbers for the model's texts; the result that the model gets is the run's.
    matches.add(runs, lambda run, call: matches.is_answered_by(call, run))
    # Or another tool than the model knows runs.
    matches.add(
        runs,
        lambda run, call: _is_passed(run.arguments, call.arguments) and matches.is_answered_by(call, run),
        renamed=True,
    )
    matches.add_repeats(runs)
    return [_with_call(s, matches.calls[s.span_id]) if s.span_id in matches.calls else s for s in spans]


def persons_answers(spans: Iterable[Span]) -> frozenset[str]:
    """What a person answered where a program of these spans had paused."""
    return frozenset(str(s.attributes[semconv.RESUMED_WITH]) for s in spans if semconv.RESUMED_WITH in s.attributes)


def is_answered(result: str, answers: Iterable[str]) -> bool:
    """Whether the result of a tool call for which no tool ran is what a person answered."""
    return any(result == answer or (len(answer) >= _WORD and answer in result) for answer in answers)


def tool_name(tool: Span) -> str:
    """The name of the tool that a span is a run of."""
    return str(tool.attributes.get(semconv.TOOL_NAME) or tool.name.removeprefix(f"{semconv.EXECUTE_TOOL} "))


class _Matches:
    """Which tool call each run belongs to.

    Attributes:
        calls: id of a tool's span -> the tool call.
    """

    def __init__(self, spans: Sequence[Span], calls: Sequence[Call]) -> None:
        self.calls: dict[str, _Issued] = {}
        self._by_id = {s.span_id: s for s in spans}
        self._position = {s.span_id: i for i, s in enumerate(spans)}
        self._chats = [s for s in spans if s.operation == semconv.CHAT]
        self._gateway = calls
        taken = {s.attributes.get(semconv.TOOL_CALL_ID) for s in spans if s.operation != semconv.CHAT}
        taken |= {call_id for s in spans for call_id in s.attributes.get(semconv.STRUCTURED_ANSWERS, ())}
        known = {call.id: call for call in [*self._of_chats(), *self._of_gateway()]}
        self._free = [call for call in known.values() if call.id not in taken]
        self._names = {call.name for call in known.values()}

    def add(self, runs: Iterable[_Run], fits: Callable[[_Run, _Issued], bool], *, renamed: bool = False) -> None:
        """Join each run that has no call to the nearest free one that fits and has its name, or, if `renamed`, another
        one where no call has that."""
        for run in runs:
            if run.span.span_id in self.calls:
                continue
            named = [call for call in self._free if call.name == run.name]
            if renamed and run.name not in self._names:
                named = self._free
            candidates = [call for call in named if fits(run, call)]
            if not candidates:
                continue
            nearest = min(candidates, key=lambda call: self._distance(run.span, call))
            self.calls[run.span.span_id] = nearest
            # What paused will run again.
            if not run.span.attributes.get(semconv.PAUSED):
                self._free.remove(nearest)

    def add_repeats(self, runs: Sequence[_Run]) -> None:
        """Join what is left to the call of an equal run: a program tries a tool again, or a node begins anew."""
        done = {_key(run): self.calls[run.span.span_id] for run in runs if run.span.span_id in self.calls}
        for run in runs:
            if _key(run) in done:
                self.calls.setdefault(run.span.span_id, done[_key(run)])

    def changed(self, call: _Issued) -> list[Any]:
        """The arguments that a tool call has in later requests."""
        return self._sent[0].get(call.id, [])

    def is_answered_by(self, call: _Issued, run: _Run) -> bool:
        """Whether a later request answers a tool call with what a run returned."""
        return (
            not self._sent[1].get(call.id, set()).isdisjoint(_forms(run.span.attributes.get(semconv.TOOL_CALL_RESULT)))
        )

    @functools.cached_property
    def _sent(self) -> tuple[dict[str, list[Any]], dict[str, set[str]]]:
        """Tool call id -> its arguments in all requests, and -> the texts of its results."""
        arguments: dict[str, list[Any]] = {}
        results: dict[str, set[str]] = {}
        histories = [_readable(read.sent, chat) for chat in self._chats]
        histories += [_readable(read.messages, c.request.get("messages") or []) for c in self._gateway]
        for message in (message for history in histories for message in history):
            for call in message.tool_calls:
                arguments.setdefault(call.id, []).append(_json_value(call.arguments))
            for result in message.tool_results:
                results.setdefault(result.id, set()).add(result.text)
        return arguments, results

    def _distance(self, run: Span, call: _Issued) -> tuple[int, bool, int]:
        """How far a call is from a run: by nesting first, then whether it was issued later, then how long before."""
        around = set(self._upwards(call.chat))
        apart = next((i for i, id in enumerate(self._upwards(run.span_id)) if id in around), len(self._by_id))
        at = self._position[run.span_id]
        return apart, call.position > at, abs(at - call.position)

    def _upwards(self, span_id: str | None) -> Iterator[str]:
        while span_id is not None and (span := self._by_id.get(span_id)) is not None:
            yield span_id
            span_id = span.parent_id

    def _of_chats(self) -> Iterator[_Issued]:
        for chat in self._chats:
            yield from self._issued(_readable(read.said, chat), chat.agent or "", chat.span_id)

    def _of_gateway(self) -> Iterator[_Issued]:
        for call in self._gateway:
            answers = _readable(read.answers, [dict(call.response)]) if call.response else []
            yield from self._issued(answers, call.agent, call.span_id)

    def _issued(self, answers: Iterable[Message], agent: str, chat: str | None) -> Iterator[_Issued]:
        at = self._position.get(chat or "", -1)
        for call in (call for answer in answers for call in answer.tool_calls if call.id):
            yield _Issued(call.id, call.name, _json_value(call.arguments), agent, chat, at)


def _is_unjoined(span: Span) -> bool:
    known = (semconv.TOOL_CALL_ID, semconv.ISSUED_BY, semconv.HANDOFF_TO, semconv.UNTRAINED)
    return span.operation == semconv.EXECUTE_TOOL and not any(name in span.attributes for name in known)


def _with_call(span: Span, call: _Issued) -> Span:
    facts = {**span.attributes, semconv.TOOL_CALL_ID: call.id}
    return replace(span, attributes=facts | ({semconv.AGENT_NAME: call.agent} if call.agent else {}))


def _recorded_arguments(tool: Span) -> Any:
    arguments = tool.attributes.get(semconv.TOOL_CALL_ARGUMENTS)
    return None if arguments is None else _json_value(arguments)


def _json_value(arguments: Any) -> Any:
    """A tool call's arguments as JSON values; the text where it is not JSON."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _is_passed(arguments: Any, asked: Any) -> bool:
    """Whether a run's arguments are those of a call; a tool with one argument may be passed that alone."""
    if arguments is None:
        return False
    return arguments == asked or (isinstance(asked, dict) and [arguments] == [*asked.values()])


def _forms(result: Any) -> list[str]:
    """How a program may write a recorded result: JSON, or Python's text of the same value."""
    return [] if result is None else [str(result), str(_json_value(str(result)))]


def _extends(arguments: Any, asked: Any) -> bool:
    return isinstance(arguments, dict) and isinstance(asked, dict) and asked.items() <= arguments.items()


def _key(run: _Run) -> tuple[str, str]:
    return run.name, json.dumps(run.arguments, sort_keys=True, default=str)


def _readable(read: Callable[[Any], list[Message]], recorded: Any) -> list[Message]:
    """Messages; none where they are in no known form."""
    try:
        return read(recorded)
    except UnreadableMessageError:
        return []
