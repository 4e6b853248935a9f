"""Continues a conversation token for token with any chat template: the old ids stay, only new text is tokenised.

The text between a sampled answer and the next generation prompt is taken from a placeholder conversation. Before it is
used for a kind of continuation, synthetic conversations must show that the template is append-only for that kind. Where
it is not, there is a reason instead of a continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from agl.trainer.rendering.normalise import Tools
from agl.trainer.rendering.toolchoice import VALUE, Render, placeholder_call

MOST_KINDS = 256
"""How many kinds of continuations have their joints kept."""
_ANSWER = "placeholder answer"
_THOUGHT = "placeholder thought"
_SYSTEM = {"role": "system", "content": "placeholder system"}
_USER = {"role": "user", "content": "placeholder user"}
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "placeholder_tool",
            "description": "placeholder",
            "parameters": {"type": "object", "properties": {"placeholder_key": {"type": "string"}}},
        },
    },
)


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


class _NotAppendOnly(Exception):
    """A template cannot be continued; the message is the reason."""


class TemplateBridge:
    """Exact continuation for one chat template. Thread-safe.

    Args:
        render: the template.
        encode: text -> ids; control tokens in the text are recognised, none is added.
        control: text of each control token -> its id.
        eos: ids that the model is known to stop on.

    Attributes:
        stop_ids: `eos` and the control tokens that the template ends an assistant's turn with.
    """

    def __init__(
        self, render: Render, encode: Callable[[str], list[int]], control: dict[str, int], eos: Sequence[int]
    ) -> None:
        self._render = render
        self._encode = encode
        self._control = control
        self._joints: dict[Kind, Joint | str] = {}
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(eos))
        for kind in (Kind(("user",), False, False, False), Kind(("tool",), True, False, False)):
            close = self._turn_close(kind)
            if close is not None and close not in self.stop_ids:
                self.stop_ids = (*self.stop_ids, close)

    def fork_reason(self, kind: Kind) -> str | None:
        """Why continuations of this kind fork; None when they are exact."""
        joint = self._joint(kind)
        return joint if isinstance(joint, str) else None

    def extend(
        self, kind: Kind, last_id: int | None, new_messages: list[dict[str, Any]], tools: Tools
    ) -> list[int] | str:
        """The ids to put after the old ones.

        Args:
            kind: of the continuation.
            last_id: the last sampled id.
            new_messages: normalised.
            tools: of the request, the same as in the old prompt.

        Returns:
            The ids of the difference, or the reason of the fork.
        """
        joint = self._joint(kind)
        if isinstance(joint, str):
            return joint
        try:
            tail = self._tail(kind, joint, new_messages, tools)
        except (_NotAppendOnly, TemplateError) as error:
            return str(error)
        stopped = last_id in self.stop_ids
        if not stopped:
            return self._encode(joint.close + tail)
        if self._control.get(joint.close) != last_id:
            return f"the answer ended with token {last_id}, the chat template ends it with {joint.close!r}"
        return self._encode(tail)

    def _joint(self, kind: Kind) -> Joint | str:
        joint = self._joints.get(kind)
        if joint is None:
            try:
                joint = self._prove(kind)
            except (_NotAppendOnly, TemplateError) as error:
                joint = str(error)
            self._joints[kind] = joint
            # An agent chooses the roles of its messages, and so could fill the memory with kinds.
            while len(self._joints) > MOST_KINDS:
                self._joints.pop(next(iter(self._joints)), None)
        return joint

    def _prove(self, kind: Kind) -> Joint:
        """The joint of a kind, checked on every shape of history.

        Raises:
            _NotAppendOnly, TemplateError: there is none.
        """
        tools = _TOOLS if kind.tools else None
        new = synthetic(kind.roles)
        history = _history(kind, _call_ids(new))
        text = self._render([*history, *new], tools, True)
        end = _answer_end(text, kind)
        joint = self._split(kind, history, text, end, tools)
        for earlier in _earlier(kind):
            self._check(kind, joint, earlier, new, tools)
        return joint

    def _split(self, kind: Kind, history: list[dict[str, Any]], text: str, end: int, tools: Tools) -> Joint:
        """The joint in `text`, the rendered `history` and new messages; the answer's last marker ends at `end`."""
        first_new = text.find(_new_text(0), end)
        if first_new < 0:
            raise _NotAppendOnly("the chat template does not write the new messages after the answer")
        between = text[end:first_new]
        stops = [t for t, i in self._control.items() if i in self.stop_ids and t in between]
        if stops:
            close = min(stops, key=between.index)
            at = between.index(close)
            return Joint(between[:at], close, text[end + at + len(close) :])
        history_text = self._render(history, tools, False)
        rest = history_text[_answer_end(history_text, kind) :]
        if not text[end:].startswith(rest):
            raise _NotAppendOnly("the chat template ends an answer differently once the conversation goes on")
        return Joint(rest, "", text[end + len(rest) :])

    def _check(
        self, kind: Kind, joint: Joint, earlier: list[dict[str, Any]], new: list[dict[str, Any]], tools: Tools
    ) -> None:
        """Raise `_NotAppendOnly` unless prompt + answer + joint is the template's text of the whole conversation."""
        *_, answer = _history(kind, _call_ids(new))
        prompt = self._render(earlier, tools, True)
        whole = self._render([*earlier, answer, *new], tools, True)
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

    def _tail(self, kind: Kind, joint: Joint, new_messages: list[dict[str, Any]], tools: Tools) -> str:
        ids = [str(m.get("tool_call_id") or _call_id(i)) for i, m in enumerate(new_messages[: kind.n_calls])]
        text = self._render([*_history(kind, ids), *new_messages], tools, True)
        end = _answer_end(text, kind)
        rest = joint.rest.replace(_call_id(len(ids) - 1), ids[-1]) if ids else joint.rest
        if not text.startswith(rest + joint.close, end):
            raise _NotAppendOnly("the chat template ends an answer differently before these messages")
        return text[end + len(rest) + len(joint.close) :]

    def _turn_close(self, kind: Kind) -> int | None:
        """The control token right after an assistant's turn; None when the template writes none there."""
        tools = _TOOLS if kind.tools else None
        new = synthetic(kind.roles)
        history = _history(kind, _call_ids(new))
        try:
            text = self._render([*history, *new], tools, True)
            end = _answer_end(text, kind)
            if kind.n_calls:
                end += len(self._split(kind, history, text, end, tools).rest)
        except (_NotAppendOnly, TemplateError):
            return None
        ids = self._encode(text[end:].lstrip())
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
    tools = _TOOLS if kind.tools else None
    new = synthetic(kind.roles)
    history = _history(kind, _call_ids(new))
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
            message |= {"tool_call_id": _call_id(i), "name": "placeholder_tool"}
        messages.append(message)
    return messages


def _call_ids(new: list[dict[str, Any]]) -> list[str]:
    return [m["tool_call_id"] for m in new if m["role"] == "tool"]


def _history(kind: Kind, call_ids: Sequence[str]) -> list[dict[str, Any]]:
    """The shortest history for `kind`, which ends with an answer."""
    answer: dict[str, Any] = {"role": "assistant", "content": "" if kind.n_calls else _ANSWER}
    if kind.n_calls:
        answer["tool_calls"] = [placeholder_call("placeholder_tool", i) for i in call_ids[: kind.n_calls]]
    if kind.reasoning:
        answer["reasoning_content"] = _THOUGHT
    return [*([_SYSTEM] if kind.system else []), _USER, answer]


def _earlier(kind: Kind) -> list[list[dict[str, Any]]]:
    """Conversations up to a generation prompt, of every shape that templates are known to branch on."""
    start = [*([_SYSTEM] if kind.system else []), _USER]
    answer = {"role": "assistant", "content": "earlier answer"}
    shapes = [start, [*start, answer, {"role": "user", "content": "another user"}]]
    if kind.tools:
        calls = [placeholder_call("placeholder_tool", "early0001", "-")]
        call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
        if kind.reasoning:
            call["reasoning_content"] = "earlier thought"
        result = {"role": "tool", "content": "earlier result", "tool_call_id": "early0001", "name": "placeholder_tool"}
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
