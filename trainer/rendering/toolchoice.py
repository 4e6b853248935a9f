"""The opening of a tool call as the chat template writes it, so that a required call can be begun in the prompt.

The opening is taken from a rendered placeholder call: the text between the generation prompt and the tool's name (any
tool), or its arguments (one tool).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agl.errors import ConfigError
from agl.trainer.rendering.normalise import Tools

NAME = "placeholder_tool"
KEY = "placeholder_key"
VALUE = "placeholder value"
CALL_ID = "call00001"
PLACEHOLDER_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "placeholder",
            "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}},
        },
    },
)

Form = tuple[str, dict[str, Any], str, str]
Forms = tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A tool call that the answer must be.

    Attributes:
        opening: the text that begins it.
        rests: the ways to end it: text, the JSON schema of the arguments that follow it, text up to the end of the
            answer (`CALL_ID` in it stands for any id of nine letters and digits), and how arguments are written: as
            JSON, or as XML elements like Qwen3-Coder's. Empty where the template writes them in another form.
    """

    opening: str
    rests: Forms

    @property
    def trigger(self) -> str:
        """What begins a call, by which other text differs from it: a tag, such as `<tool_call>`, or `{` where a call is
        the whole answer; "" for nothing."""
        tag = re.match(r"\s*<[^<>\s]+>|\[TOOL_CALLS\]|\{", self._after_reasoning)
        return tag.group() if tag else ""

    @property
    def forms(self) -> Forms:
        """The whole calls, in the form of `rests`."""
        return tuple((self._after_reasoning + text, schema, close, style) for text, schema, close, style in self.rests)

    @property
    def _after_reasoning(self) -> str:
        """`opening` where the answer has reasoned; some generation prompts begin that, and a call has to end it."""
        _, ends, call = self.opening.rpartition("</think>")
        return call.lstrip("\n") if ends else call


class Render(Protocol):
    """The full text of a conversation."""

    def __call__(self, messages: list[dict[str, Any]], tools: Tools, generation: bool) -> str: ...


def placeholder_call(name: str, call_id: str, value: str = VALUE) -> dict[str, Any]:
    """A tool call whose rendering shows where name and arguments go."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {KEY: value}}}


def rendered_call(render: Render, tools: Tools, name: str) -> str | None:
    """The text after the generation prompt when the assistant calls `name`; None if the template writes no call there.

    The call is followed by its result, since some templates write the last answer differently from earlier ones.
    """
    user = {"role": "user", "content": "placeholder"}
    assistant = {"role": "assistant", "content": "", "tool_calls": [placeholder_call(name, CALL_ID)]}
    result = {"role": "tool", "content": "placeholder", "tool_call_id": CALL_ID, "name": name}
    prompt = render([user], tools, True)
    whole = render([user, assistant, result], tools, False)
    call = whole[len(prompt) :] if whole.startswith(prompt) else ""
    return call if name in call and KEY in call.partition(name)[2] else None


def xml_parameter(name: str, value: str) -> str:
    """An argument as Qwen3-Coder and 3.5 write it."""
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def forced_call(render: Render, tools: Tools, force: str | bool, ends: Sequence[str]) -> ForcedCall:
    """The call that `force` asks for.

    Args:
        render: of the model.
        tools: of the request.
        force: a tool's name, or True for any of them.
        ends: the texts that an answer can end with.

    Raises:
        ConfigError: no such tool, or the template cannot write a tool call right after its generation prompt.
    """
    schemas = {str(f.get("name")): f.get("parameters") or {} for f in (t.get("function", t) for t in tools or ())}
    names = list(schemas)
    if force is not True and force not in names:
        raise ConfigError(f"tool_choice names {force!r}, which is none of the request's tools", hint=f"tools: {names}")
    if not names:
        raise ConfigError("tool_choice asks for a tool call, but the request has no tools", hint="pass tools=[...]")
    name = names[0] if len(names) == 1 else NAME if force is True else str(force)
    call = rendered_call(render, tools, name)
    if call is None:
        raise ConfigError(
            "tool_choice cannot be enforced: the chat template writes no tool call right after its generation prompt",
            hint='use tool_choice="auto" with this model',
        )
    before, _, after = call.partition(name)
    opening = before
    if name is not NAME:
        between = re.sub(r"(\{\s*\"|<[^<>]*)$", "", after[: after.index(KEY)]).removesuffix("<arg_key>")
        opening = (before + name + between).rstrip(" ")
        schemas = {name: schemas[name]}
    style = "json"
    between, found, rest = after.partition(json.dumps({KEY: VALUE}))
    if not found:
        style = "xml"
        between, found, rest = after.partition(xml_parameter(KEY, VALUE))
    close = min((rest.partition(end)[0] for end in ends if end in rest), key=len, default=None)
    if not found or close is None or CALL_ID in between + ("" if "[TOOL_CALLS]" in before else close):
        return ForcedCall(opening, ())
    rests = (((before + tool + between)[len(opening) :], schema, close, style) for tool, schema in schemas.items())
    return ForcedCall(opening, tuple(rests))
