"""Continues a conversation token for token with any chat template: the old ids stay, only new text is tokenised.

The text between a sampled answer and the next generation prompt is taken from a placeholder conversation. Before it is
used for a kind of continuation, synthetic conversations must show that the template is append-only for that kind. Where
it is not, there is a reason instead of a continuation.

Some templates refuse conversations that a policy can cause: two tool calls in one answer, or a user message after a
tool result. There is no text of such a conversation that a continuation could differ from, so the new messages are
written part by part, each as the template writes it after an answer. Neighbours of one role that the template refuses
are joined, as they are in a whole history (`normalise.joined`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from agl.mdp.types import IntArray
from agl.trainer.rendering.normalise import Tools, joined
from agl.trainer.rendering.token_text import CONTEXT
from agl.trainer.rendering.toolchoice import NAME, PLACEHOLDER_TOOLS, VALUE, Render, placeholder_call

MOST_KINDS = 256
"""How many kinds of continuations have their joints kept."""
_ANSWER = "placeholder answer"
_THOUGHT = "placeholder thought"
_SYSTEM = {"role": "system", "content": "placeholder system"}
_USER = {"role": "user", "content": "placeholder user"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of continuation: everything that a template may branch on.

    Attributes:
        roles: of the new messages.
        tools: whether the request has tools.
        system: whether the history begins with a system message.
        reasoning: whether the old ids contain a reasoning block.
    """

    roles: tuple[str, ...]
    tools: bool
    system: bool
    reasoning: bool

    @property
    def n_calls(self) -> int:
        """How many tool results the new messages begin with; the answer before them made as many calls."""
        return next((i for i, role in enumerate(self.roles) if role != "tool"), len(self.roles))


@dataclass(frozen=True, slots=True)
class Joint:
    """The text between the placeholder answer and the next generation prompt.

    Attributes:
        rest: text of the assistant's turn after the placeholder's last marker; part of a real, sampled answer.
        close: the control token that ends the turn, sampled in a complete answer; "" when the template writes none.
        tail: the text after it, up to and including the next generation prompt, for the synthetic messages.
    """

    rest: str
    close: str
    tail: str


@dataclass(frozen=True, slots=True)
class Part:
    """New messages that the template writes together.

    Attributes:
        kind: of a conversation in which they follow an answer.
        joint: its joint.
        count: how many they are; more than the roles of `kind` where neighbours of one role are joined.
    """

    kind: Kind
    joint: Joint
    count: int


class _NotAppendOnly(Exception):
    """A template cannot be continued; the message is the reason."""


class TemplateBridge:
    """Exact continuation for one chat template. Thread-safe.

    Args:
        render: the template.
        encode: ids before a text, and the text -> its ids (`TokenText.encode_after`).
        control: text of each control token -> its id.
        eos: ids that the model is known to stop on.

    Attributes:
        stop_ids: `eos` and the control tokens that the template ends an assistant's turn with.
    """

    def __init__(
        self,
        render: Render,
        encode: Callable[[Sequence[int] | IntArray, str], list[int]],
        control: dict[str, int],
        eos: Sequence[int],
    ) -> None:
        self._render = render
        self._encode = encode
        self._control = control
        self._parts: dict[Kind, tuple[Part, ...] | str] = {}
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(eos))
        for kind in (Kind(("user",), False, False, False), Kind(("tool",), True, False, False)):
            close = self._turn_close(kind)
            if close is not None and close not in self.stop_ids:
                self.stop_ids = (*self.stop_ids, close)

    def fork_reason(self, kind: Kind) -> str | None:
        """Why continuations of this kind fork; None when they are exact."""
        parts = self._parts_of(kind)
        return parts if isinstance(parts, str) else None

    def extend(
        self, kind: Kind, prompt: IntArray, response: IntArray, new_messages: list[dict[str, Any]], tools: Tools
    ) -> list[int] | str:
        """The ids to put after the old ones.

        Args:
            kind: of the continuation.
            prompt, response: int32 [P], [R], the old ids.
            new_messages: normalised.
            tools: of the request, the same as in the old prompt.

        Returns:
            The ids of the difference, or the reason of the fork.
        """
        parts = self._parts_of(kind)
        if isinstance(parts, str):
            return parts
        try:
            tail = self._tail(parts, new_messages, tools)
        except (_NotAppendOnly, TemplateError) as error:
            return str(error)
        close = parts[0].joint.close
        before = np.concatenate([prompt[-CONTEXT:], response])
        last_id = int(response[-1]) if response.size else None
        closed = self._control.get(close) == last_id
        # What the template does not take as it is has no exact text: any other end is followed by the template's.
        if last_id not in self.stop_ids or (parts[0].kind.roles != kind.roles and not closed):
            return self._encode(before, close + tail)
        if not closed:
            return f"the answer ended with token {last_id}, the chat template ends it with {close!r}"
        return self._encode(before, tail)

    def _parts_of(self, kind: Kind) -> tuple[Part, ...] | str:
        """The parts in which new messages of a kind are written, or why there is no continuation."""
        parts = self._parts.get(kind)
        if parts is None:
            try:
                parts = self._proven(kind) if self._accepts(kind) else self._apart(kind)
            except (_NotAppendOnly, TemplateError) as error:
                parts = str(error)
            self._parts[kind] = parts
            # An agent chooses the roles of its messages, and so could fill the memory with kinds.
            while len(self._parts) > MOST_KINDS:
                self._parts.pop(next(iter(self._parts)), None)
        return parts

    def _accepts(self, kind: Kind) -> bool:
        """Whether the template takes conversations of a kind."""
        try:
            self._rendered(kind)
        except TemplateError:
            return False
        return True

    def _rendered(self, kind: Kind) -> str:
        """The text of the shortest conversation of a kind, up to the next generation prompt."""
        new = synthetic(kind.roles)
        return self._render([*_history(kind, new), *new], PLACEHOLDER_TOOLS if kind.tools else None, True)

    def _proven(self, kind: Kind) -> tuple[Part, ...]:
        """The new messages as one part, checked on every shape of history.

        Raises:
            _NotAppendOnly, TemplateError: they cannot be continued so.
        """
        joint = self._joint(kind)
        for earlier in _earlier(kind):
            self._check(kind, joint, earlier)
        return (Part(kind, joint, len(kind.roles)),)

    def _apart(self, kind: Kind) -> tuple[Part, ...]:
        """New messages that the template does not take together: runs of one role, joined ones, or single results.

        What is among the old ids is in the history of no part: the system message, and tools but for the last part.

        Raises:
            _NotAppendOnly, TemplateError: the template does not take them apart either.
        """
        kinds: list[tuple[Kind, int]] = []
        for role, run in groupby(kind.roles):
            together = replace(kind, roles=tuple(run), system=False, tools=False)
            alone = replace(together, roles=(role,))
            count = len(together.roles)
            if self._accepts(together):
                kinds.append((together, count))
            elif role == "tool":
                kinds += [(alone, 1)] * count
            else:
                kinds.append((alone, count))
        # Some templates write the tools anew before the last message.
        last, count = kinds[-1]
        kinds[-1] = replace(last, tools=kind.tools), count
        return tuple(Part(part, self._joint(part), count) for part, count in kinds)

    def _joint(self, kind: Kind) -> Joint:
        """The joint in the shortest conversation of a kind.

        Raises:
            _NotAppendOnly, TemplateError: there is none.
        """
        text = self._rendered(kind)
        return self._split(kind, text, _answer_end(text, kind))

    def _split(self, kind: Kind, text: str, end: int) -> Joint:
        """The joint in the `text` of a conversation of a kind; the answer's last marker ends at `end`."""
        first_new = text.find(_new_text(0), end)
        if first_new < 0:
            raise _NotAppendOnly("the chat template does not write the new messages after the answer")
        between = text[end:first_new]
        stops = [t for t, i in self._control.items() if i in self.stop_ids and t in between]
        if stops:
            close = min(stops, key=between.index)
            at = between.index(close)
            return Joint(between[:at], close, text[end + at + len(close) :])
        history = _history(kind, synthetic(kind.roles))
        history_text = self._render(history, PLACEHOLDER_TOOLS if kind.tools else None, False)
        rest = history_text[_answer_end(history_text, kind) :]
        if not text[end:].startswith(rest):
            raise _NotAppendOnly("the chat template ends an answer differently once the conversation goes on")
        return Joint(rest, "", text[end + len(rest) :])

    def _check(self, kind: Kind, joint: Joint, earlier: list[dict[str, Any]]) -> None:
        """Raise `_NotAppendOnly` unless prompt + answer + joint is the template's text of the whole conversation.

        A history that the template refuses is never rendered, and so cannot differ.
        """
        tools = PLACEHOLDER_TOOLS if kind.tools else None
        new = synthetic(kind.roles)
        *_, answer = _history(kind, new)
        try:
            prompt = self._render(earlier, tools, True)
            whole = self._render([*earlier, answer, *new], tools, True)
        except TemplateError:
            return
        if not whole.startswith(prompt):
            raise _NotAppendOnly(
                f"the chat template rewrites the history when a {kind.roles[0]} message follows"
                + (" and there are tools" if kind.tools else "")
            )
        sampled = whole[len(prompt) : _answer_end(whole, kind)]
        has_marks = "<think>" in sampled or "</think>" in sampled
        if (_THOUGHT in sampled) != kind.reasoning or (has_marks and not kind.reasoning):
            raise _NotAppendOnly(
                f"the chat template {'drops' if kind.reasoning else 'adds'} reasoning in earlier answers "
                f"when a {kind.roles[0]} message follows"
            )
        if not (kind.reasoning or kind.n_calls or sampled.strip() == _ANSWER):
            raise _NotAppendOnly("the chat template rewrites earlier answers")
        if whole != prompt + sampled + joint.rest + joint.close + joint.tail:
            raise _NotAppendOnly(f"the chat template is not append-only when a {kind.roles[0]} message follows")

    def _tail(self, parts: Sequence[Part], new_messages: list[dict[str, Any]], tools: Tools) -> str:
        """The text of the new messages, up to and including the next generation prompt."""
        texts = []
        rest = new_messages
        for part in parts:
            messages = rest[: part.count]
            if part.count > len(part.kind.roles):
                messages = joined(messages)
            rest = rest[part.count :]
            texts.append(self._part_tail(part, messages, tools, first=not texts, last=not rest))
        return "".join(texts)

    def _part_tail(self, part: Part, messages: list[dict[str, Any]], tools: Tools, *, first: bool, last: bool) -> str:
        """The text of one part's messages; up to and including the next generation prompt if it is the last."""
        kind = part.kind
        joint = part.joint
        tools = tools if kind.tools else None
        # Where a template writes a result under the name of its call, that is the real one.
        named = NAME in joint.tail
        history = _history(kind, messages, named=named)
        text = self._render([*history, *messages], tools, last)
        end = _answer_end(text, kind)
        rest = joint.rest
        if kind.n_calls:
            placeholder = _call_id(kind.n_calls - 1)
            call_id = messages[kind.n_calls - 1].get("tool_call_id")
            rest = rest.replace(placeholder, str(call_id or placeholder))
        if not text.startswith(rest + joint.close, end):
            raise _NotAppendOnly("the chat template ends an answer differently before these messages")
        tail = text[end + len(rest) + len(joint.close) :]
        if first:
            return tail
        # The part before has what follows the end of a turn, such as a line break.
        turn = self._render(history, tools, False)
        after_turn = turn[_answer_end(turn, kind) + len(rest) + len(joint.close) :]
        if not tail.startswith(after_turn):
            raise _NotAppendOnly("the chat template ends an answer differently before these messages")
        return tail[len(after_turn) :]

    def _turn_close(self, kind: Kind) -> int | None:
        """The control token right after an assistant's turn; None when the template writes none there."""
        try:
            text = self._rendered(kind)
            end = _answer_end(text, kind)
            if kind.n_calls:
                end += len(self._split(kind, text, end).rest)
        except (_NotAppendOnly, TemplateError):
            return None
        ids = self._encode([], text[end:].lstrip())
        return ids[0] if ids and ids[0] in self._control.values() else None


@dataclass(frozen=True, slots=True)
class Example:
    """A synthetic conversation for trying a continuation.

    Attributes:
        prompt: text up to the answer.
        answer: text of the answer, with the control token that ends it if there is one.
        new: the messages that follow, normalised.
        tools: of the requests.
        whole: text of the whole conversation, up to the next generation prompt.
    """

    prompt: str
    answer: str
    new: list[dict[str, Any]]
    tools: Tools
    whole: str


def example(render: Render, kind: Kind, stops: Sequence[str]) -> Example | str:
    """The shortest conversation of a kind, with its answer as `render` writes it; or the reason why there is none.

    Args:
        render: of the model.
        kind: of the continuation.
        stops: texts of the control tokens that can end an answer.
    """
    tools = PLACEHOLDER_TOOLS if kind.tools else None
    new = synthetic(kind.roles)
    history = _history(kind, new)
    try:
        prompt = render(history[:-1], tools, True)
        whole = render([*history, *new], tools, True)
        end = _answer_end(whole, kind)
    except _NotAppendOnly as error:
        return str(error)
    if not whole.startswith(prompt):
        return f"the history is rewritten when a {kind.roles[0]} message follows"
    first_new = whole.find(_new_text(0), end)
    ends = [at + len(stop) for stop in stops if (at := whole.find(stop, end, first_new)) >= 0]
    return Example(prompt, whole[len(prompt) : min(ends, default=end)], new, tools, whole)


def _new_text(index: int) -> str:
    return f"placeholder message {index}"


def _call_id(index: int) -> str:
    return f"call{index:05d}"


def synthetic(roles: Sequence[str]) -> list[dict[str, Any]]:
    """New messages of these roles, with contents that are easy to find in a rendered conversation."""
    messages = []
    for i, role in enumerate(roles):
        message: dict[str, Any] = {"role": role, "content": _new_text(i)}
        if role == "tool":
            message |= {"tool_call_id": _call_id(i), "name": NAME}
        messages.append(message)
    return messages


def _history(kind: Kind, new: Sequence[dict[str, Any]], *, named: bool = False) -> list[dict[str, Any]]:
    """The shortest history for `kind`, which ends with an answer.

    Args:
        new: the messages that follow; the answer's calls have the ids of the results that they begin with.
        named: whether they have their names, too.
    """
    answer: dict[str, Any] = {"role": "assistant", "content": "" if kind.n_calls else _ANSWER}
    if kind.n_calls:
        answer["tool_calls"] = [
            placeholder_call(str((named and m.get("name")) or NAME), str(m.get("tool_call_id") or _call_id(i)))
            for i, m in enumerate(new[: kind.n_calls])
        ]
    if kind.reasoning:
        answer["reasoning_content"] = _THOUGHT
    return [*([_SYSTEM] if kind.system else []), _USER, answer]


def _earlier(kind: Kind) -> list[list[dict[str, Any]]]:
    """Conversations up to a generation prompt, of every shape that templates are known to branch on."""
    start = [*([_SYSTEM] if kind.system else []), _USER]
    answer = {"role": "assistant", "content": "earlier answer"}
    shapes = [start, [*start, answer, {"role": "user", "content": "another user"}]]
    if kind.tools:
        calls = [placeholder_call(NAME, "early0001", "-")]
        call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
        if kind.reasoning:
            call["reasoning_content"] = "earlier thought"
        result = {"role": "tool", "content": "earlier result", "tool_call_id": "early0001", "name": NAME}
        shapes.append([*start, call, result])
        shapes.append([*start, call, result, answer, {"role": "user", "content": "another user"}])
    return shapes


def _answer_end(text: str, kind: Kind) -> int:
    """Where the last marker of the placeholder answer ends in `text`."""
    marker, count = (VALUE, kind.n_calls) if kind.n_calls else (_ANSWER, 1)
    end = 0
    for _ in range(count):
        at = text.find(marker, end)
        if at < 0:
            raise _NotAppendOnly("the chat template does not write the answer that came before")
        end = at + len(marker)
    return end
