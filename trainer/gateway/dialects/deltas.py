"""Sampled tokens as deltas of assistant messages, which every dialect's stream is made from.

Invariant: the deltas of a choice add up to its message. Reasoning and text are passed on as soon as they cannot become
part of a mark, a tool call or a stop text any more; tool calls come whole at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agl.trainer.engines.base import Completion
from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, cut_at_stop
from agl.trainer.gateway.dialects.common import logprob_entries
from agl.trainer.gateway.dialects.content_tokens import ContentTokens, tokens_outside
from agl.trainer.rendering.reasoning import END_THINK, THINK
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolchoice import PLACEHOLDER_TOOLS, may_become_call
from agl.trainer.rendering.toolparsers import ParsedMessage

TOOL_MARKER_LENGTH = 24
"""No text that opens a tool call is longer, in characters."""

Delta = dict[str, Any]


class MessageDeltas:
    """The deltas of one request's choices, in the form of Chat Completions.

    Args:
        request: that is answered.
        rendering: of the policy that answers.
        every_token: whether log-probs are those of all tokens, and not of the text alone.
    """

    def __init__(self, request: ChatRequest, rendering: Rendering, *, every_token: bool = False) -> None:
        self._request = request
        self._rendering = rendering
        stop = max((len(s) for s in request.sampling.stop), default=0)
        # Parsers of the `renderers` package know tool calls also where a request has no tools.
        self._knows_calls = bool(request.tools) or rendering.always_reads_calls
        known_tools = request.tools or PLACEHOLDER_TOOLS
        call = rendering.possible_call(known_tools) if rendering.always_reads_calls else None
        # What begins a call, unless that is JSON without a mark.
        self._mark = call.trigger.strip(" \n{") if call else ""
        # How many characters at the end of the reasoning and of the text may become part of something else.
        self._reasoning_held_back = max(stop, len(END_THINK), len(self._mark))
        self._held_back = max(stop, TOOL_MARKER_LENGTH, len(self._mark)) if self._knows_calls else stop
        # Per choice: the text and the reasoning sent, whether the role was sent, and how many tokens were parsed.
        self._sent = [""] * request.n
        self._reasoned = [""] * request.n
        self._started = [False] * request.n
        self._parsed = [0] * request.n
        # Per choice, for log-probs: how its tokens were parsed last, and which of them make up the text.
        self._last_parsed: list[tuple[Choice, ParsedMessage] | None] = [None] * request.n
        self._tokens = [ContentTokens(rendering, every=every_token) for _ in range(request.n)]

    def push(self, choice: Choice) -> Iterator[Delta]:
        """Deltas for what was sampled of a choice since the last call."""
        k = choice.number
        n = len(choice.ids)
        yield from self._start(k)
        # Parsing the whole answer at each token would be quadratic; a long answer is parsed less often.
        if n - self._parsed[k] < 1 + n // 64 or self._request.force_tool:
            return
        self._parsed[k] = n
        parsed = self._rendering.parse(
            choice.ids,
            self._request.tools,
            forced_ids=choice.forced,
            prompt_ids=choice.prompt,
            grammar=choice.grammar,
        )
        if parsed.tool_calls or parsed.malformed:
            return
        cut = cut_at_stop(parsed, self._request.sampling.stop)
        # Some parsers read a call that is drafted within a thought as one until the thought has ended.
        if not cut.content or self._rendering.is_thinking(choice.ids, prompt_ids=choice.prompt):
            # White space at the end is dropped when text follows.
            # And a call may end a thought.
            thought = self._before_mark(cut.reasoning or "")
            yield from self._reasoning(k, _certain(thought, self._reasoning_held_back).rstrip())
            return
        if self._rendering.always_reads_calls and (
            self._is_within_a_later_thought(choice) or self._begins_like_a_call(cut.content, choice.grammar)
        ):
            return
        # Some parsers of the package read a call in letters once it has ended.
        text = _certain(self._before_mark(cut.content), self._held_back)
        if self._knows_calls:
            # White space around the text is dropped when tool calls follow.
            text = "" if text[:1].isspace() else text.rstrip()
        # Reasoning may follow, and the space before it is dropped.
        if text.isspace() or (not cut.reasoning and THINK.startswith(text.lstrip())):
            return
        if text:
            self._last_parsed[k] = choice, parsed
            yield from self._text(k, text, cut.reasoning)

    def _is_within_a_later_thought(self, choice: Choice) -> bool:
        """Whether a thought has begun after a text and has no end yet, so that what follows becomes reasoning."""
        text = self._rendering.decode(choice.ids)
        return text.rfind(THINK) > text.rfind(END_THINK)

    def _before_mark(self, text: str) -> str:
        return text.partition(self._mark)[0] if self._mark else text

    def _begins_like_a_call(self, text: str, grammar: str) -> bool:
        """Whether a text is the beginning of JSON that may become a call, where calls have no mark."""
        begun = text.lstrip()
        if not self._request.tools or not begun.startswith("{"):
            return False
        call = self._rendering.possible_call(self._request.tools)
        if call is None or call.trigger != "{":
            return False
        # An answer that is held to a schema begins otherwise than a call.
        return not grammar or may_become_call(begun, call.forms)

    def finish(self, number: int, reply: Reply) -> Iterator[Delta]:
        """Deltas that complete a choice."""
        yield from self._start(number)
        if reply.choice is not None and reply.parsed is not None:
            self._last_parsed[number] = reply.choice, reply.parsed
        yield from self._text(number, reply.message.get("content") or "", reply.message.get("reasoning_content"))
        for k, call in enumerate(reply.message.get("tool_calls") or ()):
            yield {"tool_calls": [{"index": k, **call}]}

    def logprobs(self, number: int, sampled: Choice | Completion, *, rest: bool = False) -> list[dict[str, Any]]:
        """The log-probs that belong to a choice's delta of text, right after it: of the tokens whose text the deltas
        hold by now, without those of earlier deltas; with `rest`, of all that are left."""
        ids = sampled.ids if isinstance(sampled, Choice) else sampled.token_ids.tolist()
        last = self._last_parsed[number]
        assert last is not None
        outside = tokens_outside(self._rendering, self._request, *last, ids)
        places = self._tokens[number].take(ids, self._sent[number], outside, whole=rest)
        return logprob_entries(sampled, self._rendering, places)

    def _start(self, k: int) -> Iterator[Delta]:
        if not self._started[k]:
            self._started[k] = True
            yield {"role": "assistant", "content": ""}

    def _text(self, k: int, text: str, reasoning: str | None) -> Iterator[Delta]:
        """What is new in a choice's reasoning and text."""
        yield from self._reasoning(k, reasoning or "")
        if text.startswith(self._sent[k]) and len(text) > len(self._sent[k]):
            new = text[len(self._sent[k]) :]
            # Before the delta is passed on: its log-probs are asked for right after it.
            self._sent[k] = text
            yield {"content": new}

    def _reasoning(self, k: int, reasoning: str) -> Iterator[Delta]:
        """What is new in a choice's reasoning."""
        if reasoning.startswith(self._reasoned[k]) and len(reasoning) > len(self._reasoned[k]):
            yield {"reasoning_content": reasoning[len(self._reasoned[k]) :]}
            self._reasoned[k] = reasoning


def _certain(text: str, held_back: int) -> str:
    """A text without its last characters, and without one that can end in the next token: what decodes to a replacement
    now may not then."""
    return text[: max(0, len(text) - held_back)].rstrip("\ufffd")
