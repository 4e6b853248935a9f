"""Models with a hand-written renderer in the `renderers` package: its rendering, parsing and continuation."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from renderers.base import RENDERER_REGISTRY, ParsedToolCall, ToolCallParseStatus, create_renderer
from renderers.configs import DefaultRendererConfig, config_from_name

from agl.errors import ConfigError, nearest
from agl.mdp.types import IntArray, int_array
from agl.trainer.rendering.bridge import Kind, example
from agl.trainer.rendering.normalise import Message, Tools, accepted, normalise, rename_call_ids, with_native_ids
from agl.trainer.rendering.reasoning import END_THINK, THINK
from agl.trainer.rendering.token_text import TokenText
from agl.trainer.rendering.toolparsers import Malformed, ParsedMessage, Piece, assemble, tool_call

# If the arguments are an object, INVALID_JSON only means that an XML format's untyped value is text: a readable call.
_READABLE = {ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL, ToolCallParseStatus.INVALID_JSON}


class PackageRenderer(TokenText):
    """A hand-written renderer; its continuations are tested on synthetic conversations before use. Thread-safe.

    Args:
        tokenizer: of Hugging Face.
        name: of the renderer.

    Attributes:
        stop_token_ids: the tokens that the renderer knows to end an assistant's turn.
        thinks: whether `parse` reads reasoning between `<think>` and `</think>`.

    Raises:
        ConfigError: no such renderer, or the tokenizer lacks its control tokens.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        super().__init__(tokenizer)
        self._developer = name == "gpt-oss"
        self._kimi = name.startswith("kimi")
        try:
            config: Any = config_from_name(name)
        except ValueError as error:
            raise ConfigError(f"no renderer is called {name!r}", hint=nearest(name, known_renderers())) from error
        try:
            self._renderer: Any = create_renderer(tokenizer, config)
        except Exception as error:
            raise ConfigError(
                f"the renderer {name!r} cannot be used with this tokenizer: {error}",
                hint="renderer='default' uses the tokenizer's own chat template",
                path=getattr(tokenizer, "name_or_path", None) or None,
            ) from error
        self._name = name
        # Llama's parser takes what comes before it for the end of a prompt.
        header = "<|end_header_id|>"
        self._forgetting = {tokenizer.convert_tokens_to_ids(header)} if name == "llama-3" else set[int]()
        self._later_thought = tokenizer.convert_tokens_to_ids("<|channel>") if name == "gemma4" else None
        self._proofs: dict[tuple[tuple[str, ...], bool, bool, bool], str | None] = {}
        self.stop_token_ids = tuple(int(i) for i in self._renderer.get_stop_token_ids())
        probe = self.parse(int_array(self.encode(f"{THINK}thought{END_THINK}answer")), None, int_array([]))
        self.thinks = (probe.reasoning, probe.content) == ("thought", "answer")

    def render(self, messages: list[dict[str, Any]], tools: Tools, generation: bool) -> str:
        """The text of a conversation, up to the next assistant turn if `generation`."""
        tool_list = list(tools) if tools else None
        return self.decode(self._renderer.render_ids(messages, tools=tool_list, add_generation_prompt=generation))

    def ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The ids of a conversation up to the next assistant turn.

        Raises:
            ConfigError: the renderer refuses the messages.
        """
        tool_list = list(tools) if tools else None

        def render(normal: list[dict[str, Any]]) -> list[int]:
            return self._renderer.render_ids(normal, tools=tool_list, add_generation_prompt=True)

        refusals = (ValueError, TypeError, KeyError, RecursionError)
        try:
            return accepted(render, self.normalise(messages), refusals)
        except refusals as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise ConfigError(
                f"the renderer {self._name!r} refuses these messages: {error}", hint=f"their roles are: {roles}"
            ) from error

    def extend(
        self, prompt: IntArray, response: IntArray, new: Sequence[Message], tools: Tools, system: bool
    ) -> list[int] | str:
        """The ids to put after `prompt` and `response`, or the reason of the fork."""
        old = prompt.tolist()
        sampled = response.tolist()
        messages = self.normalise(new)
        if self._kimi and messages[0]["role"] == "tool":
            messages = with_native_ids(messages, [call.id for call in self.parse(response, tools, prompt).tool_calls])
        stopped = bool(sampled) and sampled[-1] in self.stop_token_ids
        reason = self._unproven_reason(tuple(m["role"] for m in messages), bool(tools), system, stopped)
        return reason if reason is not None else self._bridge(old, sampled, messages, tools)

    def fork_reason(self, roles: tuple[str, ...], tools: bool, system: bool, reasoning: bool) -> str | None:
        """Why continuations with these new messages fork."""
        return self._try(Kind(roles, tools, system, reasoning), stopped=True)

    def parse(self, ids: IntArray, tools: Tools, prompt: IntArray) -> ParsedMessage:
        """The message in `ids`: an answer, with its forced beginning in front."""
        answer = self._readable(ids)
        tool_list = list(tools) if tools else None
        try:
            parsed = self._renderer.parse_response(answer, tools=tool_list, prompt_ids=prompt.tolist())
        except (ValueError, RecursionError):
            # JSON that Python does not read: nested too deep, or a number of too many digits.
            whole = answer[:-1] if answer and answer[-1] in self.stop_token_ids else answer
            return assemble(iter([self.decode(whole)]), None)
        begun = self._begun_behind_a_text(parsed, answer, prompt)
        if begun is not None:
            return self._followed_by_text(answer, begun, tools, prompt)
        if not tools and (message := self._in_order(parsed, answer, prompt)) is not None:
            return message
        # Some parsers drop the space before a text only where a call follows it, and that around reasoning once it has
        # ended: a stream knows neither yet, and cannot take back what it has sent.
        pieces = self._pieces(parsed.content.lstrip(), parsed.tool_calls, answer, bool(tools))
        return assemble(pieces, (parsed.reasoning_content or "").strip() or None)

    def _readable(self, ids: IntArray) -> list[int]:
        """An answer without the tokens at which the parser forgets what it has read before."""
        answer = ids.tolist()
        return [token for token in answer if token not in self._forgetting] if self._forgetting else answer

    def tokens_outside(self, ids: IntArray, tools: Tools, prompt: IntArray) -> set[int]:
        """The places of tokens that tool calls were read from."""
        if not tools:
            return set()
        answer = self._readable(ids)
        try:
            parsed = self._renderer.parse_response(answer, tools=list(tools), prompt_ids=prompt.tolist())
        except (ValueError, RecursionError):
            return set()
        return {
            place
            for call in parsed.tool_calls
            if call.token_span and call.status in _READABLE
            for place in range(*call.token_span)
        }

    def _begun_behind_a_text(self, parsed: Any, answer: list[int], prompt: IntArray) -> int | None:
        """The place where a thought without an end begins behind a text that its parser then forgets.

        To the parser, a thought with an end is a text there.
        """
        if self._later_thought is None or parsed.reasoning_complete or self._later_thought not in answer[1:]:
            return None
        at = answer.index(self._later_thought, 1)
        before = self._renderer.parse_response(answer[:at], tools=None, prompt_ids=prompt.tolist())
        return at if before.reasoning_complete and answer[0] != self._later_thought else None

    def _in_order(self, parsed: Any, answer: list[int], prompt: IntArray) -> ParsedMessage | None:
        """A message with what looks like calls as text in its place; None if nothing does. Parsers put it last."""
        if not parsed.tool_calls:
            return None
        first = next((call.token_span[0] for call in parsed.tool_calls if call.token_span), None)
        if first is None:
            # One in letters is read with the token that ends it.
            first = (
                bisect.bisect_left(range(len(answer)), True, key=lambda size: self._has_calls(answer[:size], prompt))
                - 1
            )
        return self._followed_by_text(answer, first, None, prompt)

    def _followed_by_text(self, answer: list[int], place: int, tools: Tools, prompt: IntArray) -> ParsedMessage:
        """An answer that is read up to a place and is text from there on, with the space between them."""
        before = self.parse(int_array(answer[:place]), tools, prompt)
        read = self.decode(answer[:place])
        space = read[len(read.rstrip()) :] if before.content else ""
        end = len(answer) - (answer[-1] in self.stop_token_ids)
        return replace(before, content=before.content + space + self.decode(answer[place:end]))

    def _has_calls(self, answer: list[int], prompt: IntArray) -> bool:
        return bool(self._renderer.parse_response(answer, tools=None, prompt_ids=prompt.tolist()).tool_calls)

    def _bridge(
        self, old: list[int], sampled: list[int], messages: list[dict[str, Any]], tools: Tools
    ) -> list[int] | str:
        role = messages[0]["role"]
        try:
            bridged = self._renderer.bridge_to_next_turn(old, sampled, messages, tools=list(tools) if tools else None)
        except (ValueError, TypeError, KeyError) as error:
            return f"the renderer {self._name!r} refuses these messages: {error}"
        if bridged is None:
            return f"the renderer {self._name!r} renders the history anew when a {role} message follows such an answer"
        ids = list(bridged.token_ids)
        if ids[: len(old) + len(sampled)] != old + sampled:
            return f"the renderer {self._name!r} changes the ids of an answer that continues after its end token"
        return ids[len(old) + len(sampled) :]

    def _unproven_reason(self, roles: tuple[str, ...], tools: bool, system: bool, stopped: bool) -> str | None:
        """Why this kind of continuation forks; None if it equals the whole rendering, with reasoning or without."""
        key = (roles, tools, system, stopped)
        if key not in self._proofs:
            reasons = [self._try(Kind(roles, tools, system, reasoning), stopped) for reasoning in (False, True)]
            self._proofs[key] = None if None in reasons else reasons[0]
        return self._proofs[key]

    def _try(self, kind: Kind, stopped: bool) -> str | None:
        """Continue a synthetic conversation: how the result differs from rendering it whole; None if it does not."""
        try:
            conversation = example(self.render, kind, [self.decode([i]) for i in self.stop_token_ids])
        except (ValueError, TypeError, KeyError) as error:
            if len(kind.roles) == 1:
                return f"the renderer {self._name!r} refuses such messages: {error}"
            # It has no text of such a conversation to compare with, such as one with two tool calls in an answer.
            apart = (self._try(replace(kind, roles=(role,)), stopped) for role in dict.fromkeys(kind.roles))
            return next((reason for reason in apart if reason is not None), None)
        if isinstance(conversation, str):
            return conversation
        prompt = self.encode(conversation.prompt)
        answer = self.encode(conversation.answer)
        if not stopped and answer[-1] in self.stop_token_ids:
            answer = answer[:-1]
        ids = self._bridge(prompt, answer, conversation.new, conversation.tools)
        if isinstance(ids, str):
            return ids
        if self.decode([*prompt, *answer, *ids]) != conversation.whole:
            return (
                f"the renderer {self._name!r} goes on after {'a whole' if stopped else 'a cut-short'} answer "
                f"with other text than it renders when a {kind.roles[0]} message follows"
            )
        return None

    def _pieces(self, content: str, calls: list[ParsedToolCall], ids: list[int], has_tools: bool) -> Iterator[Piece]:
        yield content
        for call in calls:
            raw = self.decode(ids[slice(*call.token_span)]) if call.token_span else call.raw
            if not has_tools:
                yield raw
            elif call.name and isinstance(call.arguments, dict) and call.status in _READABLE:
                yield tool_call(call.name, call.arguments, raw, call.id)
            else:
                yield Malformed(raw, call is calls[-1] and call.status is ToolCallParseStatus.UNCLOSED_BLOCK)

    def normalise(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in the form that `render` takes."""
        normal = normalise(messages, parse_arguments=True, developer=self._developer)
        return rename_call_ids(normal, _kimi_id) if self._kimi else normal


def _kimi_id(call_id: str, name: str, count: int) -> str:
    """Kimi shows a call by its id alone, so the id must hold the tool's name: `functions.NAME:COUNT`."""
    return call_id if call_id.startswith("functions.") else f"functions.{name}:{count}"


def known_renderers() -> list[str]:
    """The names that `renderer=` takes."""
    if not RENDERER_REGISTRY:
        # The package fills its registry when it makes its first renderer.
        create_renderer(None, DefaultRendererConfig())
    return sorted(RENDERER_REGISTRY)
