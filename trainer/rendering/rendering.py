"""Messages to token ids and back for one served model; sampled ids are never tokenised again."""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from agl.errors import ConfigError
from agl.mdp.types import IntArray, int_array
from agl.trainer.rendering.detokenizer import Detokenizer
from agl.trainer.rendering.held_answers import held_message
from agl.trainer.rendering.normalise import Message, Tools, accepted, normalise
from agl.trainer.rendering.reasoning import END_THINK, THINK, reasoning_state
from agl.trainer.rendering.token_text import CONTEXT
from agl.trainer.rendering.toolchoice import COUNT, FIRST_COUNT, PLACEHOLDER_TOOLS, ForcedCall, forced_call
from agl.trainer.rendering.toolparsers import ParsedMessage

if TYPE_CHECKING:
    from agl.trainer.rendering.chat_template import ChatTemplate
    from agl.trainer.rendering.package_renderer import PackageRenderer

Ids = Sequence[int] | npt.NDArray[np.int32]
_KNOWN_TOOLS = 64
"""Sets of tools whose calls are remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt that the model continues.

    Attributes:
        ids: int32 [P], `forced_ids` included.
        forced_ids: int32 [F], the end of `ids`: the beginning of the assistant's turn that was written for the model.
    """

    ids: IntArray
    forced_ids: IntArray


class Rendering:
    """Renders, parses and continues conversations for one model. Thread-safe; calls are CPU-bound, for a worker thread.

    Text that looks like a control token is tokenised as one, in messages of every role, as Hugging Face's
    `apply_chat_template` does.

    Args:
        tokenizer: of Hugging Face, with a chat template unless the renderer has one.
        renderer: a name from the `renderers` package; "default" takes the tokenizer's chat template; None chooses by
            `tokenizer.name_or_path`.

    Attributes:
        renderer: the name of the one in use.
        always_reads_calls: whether `parse` takes note of calls where a request has no tools, too.
        stop_token_ids: the tokens that end an answer.
        tools_refusal: why requests with tools are refused; None if they are not.
        vocabulary_size: how many tokens there
            are.

    Raises:
        ConfigError: no such renderer, or it does not fit the tokenizer.
        ModelLoadError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, *, renderer: str | None = None) -> None:
        # Imported here, since processes without the package import this module too.
        from renderers.base import MODEL_RENDERER_MAP

        self.renderer = renderer or MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""), "default")
        # A fast tokenizer drops saved truncation and padding at its first call; later calls only read, from any thread.
        tokenizer.encode("", add_special_tokens=False)
        self._tokenizer = tokenizer
        self.vocabulary_size = len(tokenizer)
        self._model: ChatTemplate | PackageRenderer
        if self.renderer == "default":
            from agl.trainer.rendering.chat_template import ChatTemplate

            self._model = ChatTemplate(tokenizer)
        else:
            from agl.trainer.rendering.package_renderer import PackageRenderer

            self._model = PackageRenderer(tokenizer, self.renderer)
        self.always_reads_calls = self.renderer != "default"
        self.stop_token_ids: tuple[int, ...] = self._model.stop_token_ids
        self.tools_refusal: ConfigError | None = getattr(self._model, "tools_refusal", None)
        self._calls: dict[str, ForcedCall | ConfigError] = {}
        self._apart: dict[str, bool] = {}
        self._marked = {THINK, END_THINK} <= tokenizer.get_added_vocab().keys()

    def prompt(
        self, messages: Sequence[Message], tools: Tools = None, *, force_tool: str | Literal[True] | None = None
    ) -> Prompt:
        """A conversation from its beginning, up to and including the generation prompt.

        Args:
            messages: OpenAI-shaped: content a text, text parts or None; tool-call arguments JSON text.
            tools: OpenAI-shaped (`{"type": "function", "function": {...}}`).
            force_tool: see `force`.

        Raises:
            ConfigError: the template refuses the messages or tools, a content part is not text, or a forced call cannot
                be begun.
        """
        return self.force(self._model.ids(messages, tools or None), tools, force_tool)

    def force(self, ids: Ids, tools: Tools, force_tool: str | Literal[True] | None) -> Prompt:
        """`ids` followed by the beginning of a tool call.

        Args:
            ids: of `prompt` or `extend`; they end with a generation prompt.
            tools: of the request.
            force_tool: a tool's name, True for any tool, None for no force.

        Raises:
            ConfigError: no such tool, or the chat template gives no beginning of a call.
        """
        prompt = _array(ids)
        opening = "" if force_tool is None else self.forced_call(tools, force_tool).opening.replace(COUNT, FIRST_COUNT)
        forced = self._model.encode_after(prompt, opening)
        return Prompt(int_array(np.concatenate([prompt, _array(forced)])), int_array(forced))

    def forced_call(self, tools: Tools, force_tool: str | Literal[True]) -> ForcedCall:
        """The call that `force` begins. Raises as it does."""
        key = json.dumps((tools, force_tool))
        call = self._calls.get(key)
        if call is None:
            ends = [self._model.decode([token]) for token in self.stop_token_ids]
            try:
                call = forced_call(self._model.render, tools, force_tool, ends)
            except ConfigError as error:
                call = error
            if len(self._calls) >= _KNOWN_TOOLS:
                self._calls.clear()
            self._calls[key] = call
        if isinstance(call, ConfigError):
            raise call
        return call

    def reasoning(self, prompt: IntArray) -> Literal["none", "possible", "open"]:
        """Whether `parse` reads reasoning at the beginning of an answer to this prompt, or whether the prompt has begun
        it. Some generation prompts end with an empty one; and a model whose vocabulary has no marks for it reasons
        where its prompt begins that, and nowhere else."""
        state = reasoning_state(self._model.decode(prompt[-CONTEXT:])) if self._model.thinks else "none"
        return "none" if state == "possible" and not self._marked else state

    def possible_call(self, tools: Tools) -> ForcedCall | None:
        """A call of any of these tools, if the chat template writes calls so that they can be told from other text."""
        try:
            call = self.forced_call(tools, True)
        except ConfigError:
            return None
        return call if call.trigger else None

    def tells_calls_apart(self, tools: Tools) -> bool:
        """Whether the first of several calls is read before the others are there: not where all are one list."""
        call = self.possible_call(tools)
        if call is None or not call.pair:
            return True
        apart = self._apart.get(call.pair)
        if apart is None:
            ids = self._model.encode(call.pair)
            if len(self._apart) >= _KNOWN_TOOLS:
                self._apart.clear()
            apart = self._apart[call.pair] = self.first_call_size(ids, tools) < len(ids)
        return apart

    @functools.cached_property
    def reads_several_calls(self) -> bool:
        """Whether the parser reads each of several calls, which an answer may have only then."""
        call = self.possible_call(PLACEHOLDER_TOOLS)
        if call is None:
            return True
        written = call.two.replace(COUNT, FIRST_COUNT)
        return len(self.parse(self._model.encode(written), PLACEHOLDER_TOOLS).tool_calls) == 2

    def extend(
        self,
        previous_prompt_ids: Ids,
        previous_response_ids: Ids,
        new_messages: Sequence[Message],
        tools: Tools = None,
        *,
        history_has_system: bool = False,
    ) -> IntArray | str:
        """A continued conversation: the old ids, exactly, then the new messages and the generation prompt.

        Args:
            previous_prompt_ids: of the previous call, forced ids included.
            previous_response_ids: the sampled ids; if they do not end with a stop token, the turn is closed here.
            new_messages: those after the previous answer; tool messages with a `name` (`normalise.with_tool_names`).
            tools: of the request, the same as those of the previous call.
            history_has_system: whether the conversation begins with a system message.

        Returns:
            int32 [P]; or, where the continuation is not proven exact, the reason to fork: use `prompt`.
        """
        if not new_messages:
            return "there is no new message"
        if any(m.get("role") == "assistant" for m in new_messages):
            return "an assistant message that this model did not sample follows"
        prompt = _array(previous_prompt_ids)
        response = _array(previous_response_ids)
        ids = self._model.extend(prompt, response, new_messages, tools or None, history_has_system)
        return ids if isinstance(ids, str) else int_array(np.concatenate([prompt, response, _array(ids)]))

    def fork_after(self, roles: Sequence[str], *, tools: bool, system: bool) -> str | None:
        """Why any conversation forks at new messages of these roles; None when none does for their sake.

        Args:
            tools: whether its requests have tools.
            system: whether it begins with a system message.
        """
        return self._model.fork_reason(tuple(roles), tools, system, False)

    def response(self, prompt_ids: Ids, messages: Sequence[Message], answer: Message, tools: Tools = None) -> IntArray:
        """An answer that another model gave, as this one would have sampled it.

        Args:
            prompt_ids: of `prompt` or `extend`, for these messages and tools, without forced ids.
            messages: of the request, whole.
            answer: the assistant's message that followed.
            tools: of the request.

        Returns:
            int32 [R], the token that ends the answer included.

        Raises:
            ConfigError: the template refuses the messages, or does not write the answer after its generation prompt;
                or what it writes is read as another message: another text, or other tool calls.
        """
        from jinja2.exceptions import TemplateError

        def render(history: list[dict[str, Any]]) -> tuple[str, str]:
            prompt = self._model.render(history[:-1], tools or None, True)
            return prompt, self._model.render(history, tools or None, False)

        refusals = (TemplateError, ValueError, TypeError, KeyError)
        try:
            prompt, whole = accepted(render, self._model.normalise([*messages, answer]), refusals)
        except refusals as error:
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        if not whole.startswith(prompt):
            raise ConfigError("the chat template writes no answer after its generation prompt")
        text = whole[len(prompt) :]
        before = _array(prompt_ids)
        ids = self._model.encode_after(before, text)
        end = next((i + 1 for i, token in enumerate(ids) if token in self.stop_token_ids), None)
        # A template that writes no end of a turn leaves it to the tokenizer's.
        ids = ids[:end] if end else [*self._model.encode_after(before, text.rstrip()), *self.stop_token_ids[:1]]
        if _facts(self.parse(ids, tools, prompt_ids=prompt_ids)) != _facts(answer):
            raise ConfigError("the answer is another one when it is read back")
        return int_array(ids)

    def parse(
        self,
        response_ids: Ids,
        tools: Tools = None,
        *,
        forced_ids: Ids = (),
        prompt_ids: Ids = (),
        grammar: str = "",
    ) -> ParsedMessage:
        """The sampled message of the assistant.

        Args:
            response_ids: sampled, stop token included where there was one.
            tools: of the request; without tools nothing is read as a tool call.
            forced_ids: of the prompt.
            prompt_ids: of the prompt, `forced_ids` included: it may have opened a reasoning block.
            grammar: that the answer was held to; JSON of its schema is a text, whatever its strings spell.
        """
        answer = np.concatenate([_array(forced_ids), _array(response_ids)])
        is_forced = len(forced_ids) > 0
        if grammar and not is_forced:
            # Parsers of the package strip thoughts of all white space.
            around_thoughts = None if self.always_reads_calls else "\n"
            held = held_message(self._model.decode(self._without_stop(answer)), grammar, around_thoughts)
            if held is not None:
                return held
        before = _array(prompt_ids[: len(prompt_ids) - len(forced_ids)])
        message = self._model.parse(answer, tools or None, before)
        if message.tool_calls and not message.unfinished and self._begins_call(answer):
            return replace(message, unfinished=True)
        return message

    def _begins_call(self, answer: IntArray) -> bool:
        """Whether an answer with calls ends with the beginning of another one, which parsers may leave out or read as
        text."""
        call = self.possible_call(PLACEHOLDER_TOOLS)
        begin, end = call.marks if call else ("", "")
        if not begin or not end:
            return False
        rest = self._model.decode(self._without_stop(answer)).rpartition(end)[2]
        return begin in rest or any(rest.endswith(begin[:size]) for size in range(1, len(begin)))

    def first_call_size(self, response_ids: Ids, tools: Tools, *, forced_ids: Ids = (), prompt_ids: Ids = ()) -> int:
        """How many of the sampled tokens are needed for the first tool call where several were sampled; else all.

        Args:
            response_ids, tools, forced_ids, prompt_ids: as for `parse`.
        """
        ids = _array(response_ids)

        def parsed(size: int) -> ParsedMessage:
            return self.parse(ids[:size], tools, forced_ids=forced_ids, prompt_ids=prompt_ids)

        whole = parsed(ids.size)
        if len(whole.tool_calls) + len(whole.malformed) < 2:
            return ids.size

        def is_one_call(size: int) -> bool:
            return len(parsed(size).tool_calls) == 1 and not parsed(size).malformed

        first = bisect.bisect_left(range(ids.size), True, key=lambda size: bool(parsed(size).tool_calls))
        # In some forms the beginning of a second call hides the first: then this was no bisection.
        sizes = [first] if is_one_call(first) else range(ids.size)
        return next((size for size in sizes if is_one_call(size)), ids.size)

    def is_thinking(self, response_ids: Ids, *, prompt_ids: Ids) -> bool:
        """Whether the beginning of an answer has begun a thought, or its prompt has, that has no end yet."""
        if not self._model.thinks:
            return False
        text = self._model.decode(_array(response_ids))
        begun = text.lstrip().startswith(THINK) or self.reasoning(_array(prompt_ids)) == "open"
        return begun and END_THINK not in text

    def reasoning_places(self, response_ids: Ids, parsed: ParsedMessage, *, prompt_ids: Ids = ()) -> set[int]:
        """The places of the sampled tokens that are reasoning, the marks around it included.

        Args:
            response_ids, prompt_ids: as for `parse`; reasoning is never forced.
            parsed: the result of `parse`.
        """
        if not parsed.reasoning:
            return set()
        ids, before = self._without_stop(_array(response_ids)), _array(prompt_ids)

        def read(size: int) -> ParsedMessage:
            return self._model.parse(ids[:size], None, before)

        def ended(size: int) -> bool:
            return END_THINK in self._model.decode(ids[:size])

        def holds_all(size: int) -> bool:
            return read(size).reasoning == parsed.reasoning

        sizes = range(ids.size)
        if ended(ids.size):
            size = bisect.bisect_left(sizes, True, key=ended)
            if holds_all(size) and not read(size - 1).content:
                return {*range(size)}
        # Some parsers find thoughts after a text, too.
        text = self._model.decode(ids)
        begun = THINK if self.reasoning(before) == "open" else ""
        thoughts = [*re.finditer(f"{THINK}(.*?)(?:{END_THINK}|\\Z)", begun + text, re.S)]
        # A mark that begins a thought again is no text of it.
        if "".join(thought[1] for thought in thoughts).replace(THINK, "").strip() == parsed.reasoning.strip():
            spans = [(thought.start() - len(begun), thought.end() - len(begun)) for thought in thoughts]
            return self._places_within(ids, spans)
        # Without its mark, the answer was cut, or has others.
        return {*range(bisect.bisect_left(sizes, True, key=holds_all))}

    def _places_within(self, ids: IntArray, spans: Sequence[tuple[int, int]]) -> set[int]:
        """The places of the tokens that make up these parts of a text, in characters."""
        ends = [len(self._model.decode(ids[: place + 1])) for place in range(ids.size)]
        starts = [0, *ends][: ids.size]
        return {
            place
            for place in range(ids.size)
            if any(starts[place] < last and ends[place] > first for first, last in spans)
        }

    def _empty_thought(self, ids: IntArray, parsed: ParsedMessage) -> set[int]:
        """The places of the marks around a thought without a text, where the parser has left them out."""
        marks = re.match(rf"\s*(?:{THINK})?\s*{END_THINK}", self._model.decode(ids))
        if marks is None or parsed.content.lstrip().startswith(marks.group().strip()):
            return set()
        return {
            *range(bisect.bisect_left(range(ids.size), marks.end(), key=lambda n: len(self._model.decode(ids[:n]))))
        }

    def tokens_outside(
        self,
        response_ids: Ids,
        parsed: ParsedMessage,
        tools: Tools = None,
        *,
        forced_ids: Ids = (),
        prompt_ids: Ids = (),
    ) -> set[int]:
        """The places of the sampled tokens that no content is made of: reasoning, calls, and what parsers leave out.

        Args:
            response_ids, tools, forced_ids, prompt_ids: as for `parse`.
            parsed: its result.
        """
        forced = len(forced_ids)
        before = _array(prompt_ids[: len(prompt_ids) - forced])
        answer = np.concatenate([_array(forced_ids), _array(response_ids)])
        thought = self.reasoning_places(response_ids, parsed, prompt_ids=prompt_ids)
        if not thought and self.always_reads_calls:
            thought = self._empty_thought(_array(response_ids), parsed)
        return thought | {place - forced for place in self._model.tokens_outside(answer, tools or None, before)}

    def _without_stop(self, ids: IntArray) -> IntArray:
        return ids[:-1] if ids.size and int(ids[-1]) in self.stop_token_ids else ids

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`text` as ids; control tokens in it are recognised. None is added, or with `special` those that the tokenizer
        adds to a text that stands alone."""
        return self._tokenizer.encode(text) if special else self._model.encode(text)

    def decode(self, ids: Ids) -> str:
        """The text of `ids`, control tokens included."""
        return self._model.decode(_array(ids))

    def decode_after(self, before: Ids, ids: Ids) -> str:
        """The text that `ids` add to the text of the ids before them, of which the last few are enough."""
        return self._model.decode_after(_array(before), _array(ids))

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a token that is a part of a character; None where they are not known."""
        return self._model.token_bytes(token)

    def detokenizer(self) -> Detokenizer:
        """Incremental decoding of one answer, without its stop token."""
        return Detokenizer(self._model.decode, self.stop_token_ids)


def _facts(message: ParsedMessage | Message) -> tuple[str, list[tuple[str, Any]]]:
    """What two forms of one message agree on: the text but for the space around it, and the tool calls' values."""
    if isinstance(message, ParsedMessage):
        return message.content.strip(), [(c.name, json.loads(c.arguments)) for c in message.tool_calls]
    (normal,) = normalise([message], parse_arguments=True, developer=True)
    calls = [c["function"] for c in normal.get("tool_calls", ())]
    return normal["content"].strip(), [(c["name"], c["arguments"]) for c in calls]


def _array(ids: Ids) -> IntArray:
    return np.asarray(ids, dtype=np.int32)
