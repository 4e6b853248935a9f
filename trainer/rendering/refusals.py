"""Whether a chat template refuses a conversation because of what a policy has sampled, or whatever that had been.

Invariant: an answer is at fault only if the template takes the same conversation with a plain answer in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from agl.errors import ConfigError
from agl.trainer.rendering.normalise import Message, Tools
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolchoice import KEY, NAME, PLACEHOLDER_TOOLS, VALUE, placeholder_call


def refused_answer(
    rendering: Rendering, messages: Sequence[Message], tools: Tools, answers: Sequence[int]
) -> int | None:
    """The answer because of which the rendering refuses a conversation.

    Args:
        messages, tools: what `Rendering.prompt` refuses.
        answers: the indices of the messages that policies have sampled, in order.

    Returns:
        Its index; None if the conversation is refused with any answers.
    """
    plain = {index: _plain(messages[index]) for index in answers}
    if not answers or not _accepts(rendering, messages, tools, plain, answers):
        return None
    for index in answers:
        others = [other for other in answers if other != index]
        if not _accepts(rendering, messages, tools, plain, others):
            return index
    return answers[-1]


def refused_histories(rendering: Rendering) -> dict[str, str]:
    """What the rendering refuses in a history, of what a policy can sample or an agent can add: that, and why.

    Where such a conversation is continued, nothing of it is rendered; where its prompt forks, it is refused.
    """
    tools = None if rendering.tools_refusal else PLACEHOLDER_TOOLS
    user = {"role": "user", "content": "placeholder"}
    text = {"role": "assistant", "content": "placeholder answer"}
    histories: dict[str, list[Message]] = {
        "an answer": [user, text, user],
        "an empty answer": [user, {**text, "content": ""}, user],
        "two user messages in a row": [user, text, user, user],
    }
    if tools:
        calls = [placeholder_call(NAME, f"call{i:05d}") for i in range(2)]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "placeholder"} for call in calls]
        one = [user, {**text, "content": None, "tool_calls": calls[:1]}, results[0]]
        histories["a tool call"] = one
        histories["two tool calls in one answer"] = [user, {**text, "content": None, "tool_calls": calls}, *results]
        histories["a user message after a tool's result"] = [*one, user]
    refused = {}
    for name, messages in histories.items():
        try:
            rendering.prompt(messages, tools)
        except ConfigError as error:
            refused[name] = str(error.__cause__ or error.message)
    return refused


def _accepts(
    rendering: Rendering,
    messages: Sequence[Message],
    tools: Tools,
    plain: dict[int, Message],
    replaced: Collection[int],
) -> bool:
    """Whether the conversation is rendered with these messages replaced, without the results of calls that are gone."""
    conversation = [plain[i] if i in replaced else message for i, message in enumerate(messages)]
    gone = {call_id for i in replaced for call_id in _call_ids(messages[i]) - _call_ids(plain[i])}
    kept = [m for m in conversation if m.get("role") != "tool" or m.get("tool_call_id") not in gone]
    try:
        rendering.prompt(kept, tools)
    except ConfigError:
        return False
    return True


def _plain(answer: Message) -> Message:
    """An answer of the same kind that every template takes that takes one of this kind: its first tool call, with
    arguments of no interest, or a text."""
    calls = answer.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": "placeholder answer"}
    function: dict[str, Any] = {"name": NAME, "arguments": {KEY: VALUE}}
    return {"role": "assistant", "content": None, "tool_calls": [{**calls[0], "function": function}]}


def _call_ids(message: Message) -> set[Any]:
    return {call.get("id") for call in message.get("tool_calls") or ()}
