"""Any tokenizer with a chat template: renders with the template, parses the tool-call format that it writes."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from jinja2.exceptions import TemplateError

from agl.errors import AglError, ConfigError, ModelLoadError
from agl.mdp.types import IntArray, int_array
from agl.trainer.rendering.bridge import Kind, TemplateBridge
from agl.trainer.rendering.normalise import Message, Tools, accepted, normalise, rename_call_ids, with_native_ids
from agl.trainer.rendering.reasoning import END_THINK, THINK, reasoning_state
from agl.trainer.rendering.template_limits import GuardedTemplate, within_limits
from agl.trainer.rendering.token_text import CONTEXT, TokenText
from agl.trainer.rendering.toolchoice import CALL_ID, NAME, placeholder_call, rendered_call
from agl.trainer.rendering.toolparsers import (
    FORMATS,
    READ_MARKS,
    ParsedMessage,
    Piece,
    ToolCall,
    ToolFormat,
    assemble,
    detect,
)

_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "probe",
            "parameters": {"type": "object", "properties": {"probe": {"type": "string"}}, "required": ["probe"]},
        },
    }
]

_PROBE_TEXT = "probe 8461"

_CACHED_PROMPTS = 256
_CACHED_BYTES = 64 * 1024
"""How many prompts are kept, and the largest of them, as JSON: a group's rollouts begin with the same one."""


class ChatTemplate(TokenText):
    """Rendering and parsing for one chat template. Thread-safe.

    Args:
        tokenizer: of Hugging Face, with a chat template.

    Attributes:
        stop_token_ids: the tokenizer's end token and the tokens that the template ends an assistant's turn with.
        thinks: whether `parse` reads reasoning, as it does where the template speaks of it.

    Raises:
        ModelLoadError: there is no chat template, it does not show the model what a user says, or it takes more time or
            memory for that than any template needs.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._loading = True
        self._templates: dict[str, GuardedTemplate] = {}
        try:
            source = str(tokenizer.get_chat_template(tools=_PROBE_TOOLS))
        except (AttributeError, ValueError) as error:
            raise ModelLoadError(
                "the tokenizer has no chat template",
                hint="set tokenizer.chat_template and save it, or use an instruction-tuned model",
                path=getattr(tokenizer, "name_or_path", None),
            ) from error
        self.thinks = "reasoning_content" in source or END_THINK in source
        marks = (self.encode(THINK), self.encode(END_THINK))
        self._marks = {ids[0] for ids in marks if len(ids) == 1}
        self._takes_parts = self._wants_parts()
        self._short_ids = self._wants_short_ids()
        special = set(tokenizer.all_special_ids)
        control = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special or i in special}
        eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        # SentencePiece's bytes may count as special, too; they are text.
        self._control_ids = [token for text, token in control.items() if self.decode([token]) == text]
        self._bridge = TemplateBridge(self.render, self.encode_after, control, eos)
        self.stop_token_ids = self._bridge.stop_ids
        self._format, written = self._tool_format()
        marks = {THINK, END_THINK}
        self._kept_without_tools = {token for text, token in control.items() if text in marks}
        marks |= {*READ_MARKS, *(text for text in control if text in written)}
        self._kept = {token for text, token in control.items() if text in marks}
        self._cached: dict[bytes, IntArray] = {}
        self._depends_on_time = "strftime_now" in source
        self._loading = False

    @property
    def tools_refusal(self) -> ConfigError | None:
        """Why requests with tools are refused; None if they are not."""
        if self._format is not None:
            return None
        return ConfigError(
            "the chat template cannot be used with tools: it does not show them to the model, or it writes tool "
            f"calls in an unknown form (known: {', '.join(FORMATS)})",
            hint="set a chat template with tools, or name the model's renderer with renderer=...",
        )

    def render(self, messages: list[dict[str, Any]], tools: Tools, generation: bool) -> str:
        """The text of a conversation, up to the next assistant turn if `generation`.

        Raises:
            TemplateError: the template refuses the messages, or fails on them.
        """
        tool_list = list(tools) if tools else None
        if self._takes_parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            if not self._loading:
                return self._guarded(messages, tool_list, generation)
            with within_limits():
                return self._guarded(messages, tool_list, generation)
        except (AglError, TemplateError):
            raise
        except Exception as error:  # a template is a program
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def _guarded(self, messages: list[dict[str, Any]], tools: list[Any] | None, generation: bool) -> str:
        """What `apply_chat_template` renders, within limits."""
        source = str(self._tokenizer.get_chat_template(tools=tools))
        if source not in self._templates:
            self._templates[source] = GuardedTemplate(source)
        variables = {"tools": tools, "documents": None, "add_generation_prompt": generation}
        return self._templates[source].render({"messages": messages, **variables, **self._tokenizer.special_tokens_map})

    def ids(self, messages: Sequence[Message], tools: Tools) -> list[int] | IntArray:
        """The ids of a conversation up to the next assistant turn.

        Raises:
            ConfigError: the template refuses the messages, or has no place for tools.
        """
        try:
            text = orjson.dumps((messages, tools))
        except orjson.JSONEncodeError:  # nested too deep, or half a surrogate pair
            return self._ids(messages, tools)
        if self._depends_on_time or len(text) > _CACHED_BYTES:
            return self._ids(messages, tools)
        ids = self._cached.get(text)
        if ids is None:
            if len(self._cached) >= _CACHED_PROMPTS:
                self._cached.clear()
            ids = self._cached[text] = int_array(self._ids(messages, tools))
        return ids

    def _ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        if tools and (refusal := self.tools_refusal) is not None:
            raise refusal
        try:
            text = accepted(lambda m: self.render(m, tools, True), self.normalise(messages), (TemplateError,))
        except TemplateError as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise ConfigError(
                f"the chat template refuses these messages: {error}", hint=f"their roles are: {roles}"
            ) from error
        return self.encode(text)

    def extend(
        self, prompt: IntArray, response: IntArray, new: Sequence[Message], tools: Tools, system: bool
    ) -> list[int] | str:
        """The ids to put after `prompt` and `response`, or the reason of the fork."""
        messages = self.normalise(new)
        if self._short_ids and messages[0]["role"] == "tool":
            messages = with_native_ids(messages, [call.id for call in self.parse(response, tools, prompt).tool_calls])
        reasoning = False
        if self.thinks:
            answer = self.decode(response)
            closed = END_THINK in answer
            if not closed and (THINK in answer or self._opens_reasoning(prompt)):
                return "the answer was cut short inside its reasoning"
            marked = np.isin(prompt, [*self._marks]).any() if len(self._marks) == 2 else "think>" in self.decode(prompt)
            reasoning = closed or bool(marked)
        kind = Kind(tuple(m["role"] for m in messages), bool(tools), system, reasoning)
        return self._bridge.extend(kind, prompt, response, messages, tools)

    def fork_reason(self, roles: tuple[str, ...], tools: bool, system: bool, reasoning: bool) -> str | None:
        """Why continuations with these new messages fork."""
        return self._bridge.fork_reason(Kind(roles, tools, system, reasoning and self.thinks))

    def parse(self, ids: IntArray, tools: Tools, prompt: IntArray) -> ParsedMessage:
        """The message in `ids`: an answer, with its forced beginning in front."""
        text = self.decode(ids[self._read(ids, tools)])
        reasoning, text = self._parted(text, prompt)
        return assemble(self._pieces(text, tools), reasoning)

    def tokens_outside(self, ids: IntArray, tools: Tools, prompt: IntArray) -> set[int]:
        """The places of tokens that are not read, and of those that tool calls were read from."""
        read = self._read(ids, tools)
        places = np.flatnonzero(read)
        text = self.decode(ids[read])
        at = len(text) - len(self._parted(text, prompt)[1])

        def length(size: int) -> int:
            return len(self.decode(ids[places[:size]]))

        # A thought without a text has marks, too.
        thought = places[: bisect.bisect_right(range(places.size + 1), at, key=length) - 1]
        outside = {int(place) for place in (*np.flatnonzero(~read), *thought)}
        for piece in self._pieces(text[at:], tools):
            end = at + len(piece if isinstance(piece, str) else piece.raw)
            if isinstance(piece, ToolCall) and end > at:
                # Tokens that complete a character before it add none.
                first = bisect.bisect_right(range(places.size + 1), at, key=length) - 1
                last = bisect.bisect_left(range(places.size), end, key=length)
                outside |= {int(place) for place in places[first:last]}
            at = end
        return outside

    def _read(self, ids: IntArray, tools: Tools) -> npt.NDArray[np.bool_]:
        """Which tokens of an answer are read: not the one that ends it, nor other control tokens."""
        # By their ids: a text that spells a control token is a text.
        kept = self._kept if tools else self._kept_without_tools
        read = ~np.isin(ids, [token for token in self._control_ids if token not in kept])
        if ids.size and int(ids[-1]) in self.stop_token_ids:
            read[-1] = False
        return read

    def _parted(self, text: str, prompt: IntArray) -> tuple[str | None, str]:
        """The thought of an answer, None without one, and the rest of it."""
        if not (self.thinks and (self._opens_reasoning(prompt) or text.lstrip().startswith(THINK))):
            return None, text
        reasoning, _, text = text.lstrip().removeprefix(THINK).partition(END_THINK)
        return reasoning.strip("\n") or None, text.lstrip("\n")

    def _pieces(self, text: str, tools: Tools) -> Iterator[Piece]:
        return self._format(text, tools) if tools and self._format else iter([text])

    def normalise(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in the form that `render` takes."""
        normal = normalise(messages, parse_arguments=True, developer=False)
        return rename_call_ids(normal, lambda i, name, count: short_id(i)) if self._short_ids else normal

    def _opens_reasoning(self, prompt: IntArray) -> bool:
        return reasoning_state(self.decode(prompt[-CONTEXT:])) == "open"

    def _wants_parts(self) -> bool:
        """Whether the template shows contents only as lists of parts, as those of models that see images do."""
        user = [{"role": "user", "content": _PROBE_TEXT}]
        refused = False
        for self._takes_parts in (False, True):
            try:
                if _PROBE_TEXT in self.render(user, None, True):
                    return self._takes_parts
            except TemplateError:
                refused = True
        # A template may want more than one user message; what it refuses later, it refuses with its own words.
        if refused:
            return False
        raise ModelLoadError(
            "the chat template does not show the model what a user says",
            hint="repair the chat template: rendering one user message must give its text",
            path=getattr(self._tokenizer, "name_or_path", None),
        )

    def _wants_short_ids(self) -> bool:
        """Whether the template takes only tool-call ids of nine letters and digits, as Mistral's do."""
        user = {"role": "user", "content": "probe"}
        tools = _PROBE_TOOLS
        for call_id, short in (("call_0123456789abcdef", False), (CALL_ID, True)):
            call = {"role": "assistant", "content": "", "tool_calls": [placeholder_call("probe_tool", call_id)]}
            result = {"role": "tool", "content": "probe", "tool_call_id": call_id, "name": "probe_tool"}
            try:
                self.render([user, call, result], tools, False)
            except TemplateError:
                continue
            return short
        return False

    def _tool_format(self) -> tuple[ToolFormat | None, str]:
        """The format of calls, None for an unknown one, and the text of one."""
        user = [{"role": "user", "content": "probe"}]
        try:
            if "probe_tool" not in self.render(user, _PROBE_TOOLS, True):
                return None, ""
            call = rendered_call(self.render, _PROBE_TOOLS, NAME)
        except TemplateError:
            return None, ""
        ends = [self.decode([token]) for token in self.stop_token_ids]
        written = min((call.partition(end)[0] for end in ends), key=len, default=call) if call else ""
        return FORMATS.get(detect(call) or "") if call else None, written


def short_id(call_id: str) -> str:
    """A tool-call id of nine letters and digits; an id of that form is unchanged."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode()).hexdigest()[:9]
