"""Sampled tokens as deltas of assistant messages, which every dialect's stream is made from.

Invariant: the deltas of a choice add up to its message. Reasoning and text are passed on as soon as they cannot become
part of a mark, a tool call or a stop text any more; tool calls come whole at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agl.trainer.engines.base import Completion
from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, cut_at_stop
from agl.trainer.gateway.dialects.common import logprob_entries
from agl.trainer.rendering.reasoning import END_THINK, THINK
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.token_text import CONTEXT

TOOL_MARKER_LENGTH = 24
"""No text that opens a tool call is longer, in characters."""

Delta = dict[str, Any]


class MessageDeltas:
    """The deltas of one request's choices, in the form of Chat Completions.

    Args:
        request: that is answered. rendering: of the policy that answers.
    """

    def __init__(self, request: ChatRequest, rendering: Rendering) -> None:
        self._request, self._rendering = request, rendering
        stop = max((len(s) for s in request.sampling.stop), default=0)
        # How many characters at the end of the reasoning and of the text may become part of something else.
        self._reasoning_held_back = max(stop, len(END_THINK))
        self._held_back = max(stop, TOOL_MARKER_LENGTH) if request.tools else stop
        # Per choice: the text and the reasoning sent, whether the role was sent, and how many tokens were parsed.
        self._sent = [""] * request.n
        self._reasoned = [""] * request.n
        self._started = [False] * request.n
        self._parsed = [0] * request.n
        # Of the parsed tokens' text, how many characters at the end are held back; how many log-probs were taken.
        self._unsent = [0] * request.n
        self._taken = [0] * request.n

    def push(self, choice: Choice) -> Iterator[Delta]:
        """Deltas for what was sampled of a choice since the last call."""
        k, n = choice.number, len(choice.ids)
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
            yield from self._reasoning(k, _certain(cut.reasoning or "", self._reasoning_held_back).rstrip())
            return
        text = _certain(cut.content, self._held_back)
        if self._request.tools:
            # White space around the text is dropped when tool calls follow.
            text = "" if text[:1].isspace() else text.rstrip()
        # Reasoning may follow, and the space before it is dropped.
        if text.isspace() or (not cut.reasoning and THINK.startswith(text.lstrip())):
            return
        if text:
            self._unsent[k] = len(parsed.content) - len(text)
            yield from self._text(k, text, cut.reasoning)

    def finish(self, number: int, reply: Reply) -> Iterator[Delta]:
        """Deltas that complete a choice."""
        yield from self._start(number)
        if not reply.message.get("tool_calls"):
            self._parsed[number], self._unsent[number] = reply.completion.token_ids.size, 0
        yield from self._text(number, reply.message.get("content") or "", reply.message.get("reasoning_content"))
        for k, call in enumerate(reply.message.get("tool_calls") or ()):
            yield {"tool_calls": [{"index": k, **call}]}

    def logprobs(self, number: int, sampled: Choice | Completion, *, rest: bool = False) -> list[dict[str, Any]]:
        """The log-probs that belong to a choice's delta of text, right after it: of the tokens whose text the deltas
        hold by now, without those of earlier deltas; with `rest`, of all tokens that are left."""
        ids = sampled.ids if isinstance(sampled, Choice) else sampled.token_ids.tolist()
        first = self._taken[number]
        last = len(ids) if rest else max(first, self._whole_tokens(number, ids))
        self._taken[number] = last
        return logprob_entries(sampled, self._rendering, first, last)

    def _whole_tokens(self, k: int, ids: Sequence[int]) -> int:
        """How many tokens of a choice have all of their text in the deltas so far."""
        n, unsent = self._parsed[k], self._unsent[k]
        if n and ids[n - 1] in self._rendering.stop_token_ids:
            n -= 1
        while unsent > 0 and n:
            n -= 1
            unsent -= len(self._rendering.decode_after(ids[max(0, n - CONTEXT) : n], [ids[n]]))
        return n

    def _start(self, k: int) -> Iterator[Delta]:
        if not self._started[k]:
            self._started[k] = True
            yield {"role": "assistant", "content": ""}

    def _text(self, k: int, text: str, reasoning: str | None) -> Iterator[Delta]:
        """What is new in a choice's reasoning and text."""
        yield from self._reasoning(k, reasoning or "")
        if text.startswith(self._sent[k]) and len(text) > len(self._sent[k]):
            yield {"content": text[len(self._sent[k]) :]}
            self._sent[k] = text

    def _reasoning(self, k: int, reasoning: str) -> Iterator[Delta]:
        """What is new in a choice's reasoning."""
        if reasoning.startswith(self._reasoned[k]) and len(reasoning) > len(self._reasoned[k]):
            yield {"reasoning_content": reasoning[len(self._reasoned[k]) :]}
            self._reasoned[k] = reasoning


def _certain(text: str, held_back: int) -> str:
    """A text without its last characters, and without one that can end in the next token: what decodes to a replacement
    now may not then."""
    return text[: max(0, len(text) - held_back)].rstrip("\ufffd")
