"""Which of an answer's tokens its content is made of: the log-probs of an answer are those of its content.

Invariant: tokens that are taken with beginnings of a content are those that are taken with the whole of it at once.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from agl.trainer.gateway.calls import ChatRequest, Choice, Reply
from agl.trainer.gateway.dialects.common import logprob_entries
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.token_text import CONTEXT
from agl.trainer.rendering.toolparsers import ParsedMessage

_PARTIAL = "\ufffd"
"""What a token decodes to that is the first part of a character."""
_MOST_PARTS = 3
"""How many tokens can follow that complete a character, which has at most four bytes."""


class ContentTokens:
    """The tokens of one answer, taken in order as its content grows.

    Args:
        rendering: of the policy.
        every: take the tokens around the content as well: its reasoning, its tool calls, the token that ends it.
    """

    def __init__(self, rendering: Rendering, *, every: bool = False) -> None:
        self._rendering = rendering
        self._every = every
        self._next = 0
        """The first token that was not passed."""
        self._length = 0
        """How many characters of the content the passed tokens make up."""
        self._last: int | None = None
        """The last token that is a part of the content."""

    def take(self, ids: Sequence[int], content: str, outside: Set[int], *, whole: bool) -> list[int]:
        """The places of the tokens that were not taken before.

        Args:
            ids: sampled so far.
            content: the text that they make up so far.
            outside: the places of those that are none of its tokens: see `Rendering.tokens_outside`.
            whole: whether that is all of the answer; until then, a token waits until all of its text is in the content.
        """
        taken = []
        end = len(ids) - bool(len(ids) and ids[-1] in self._rendering.stop_token_ids)
        while self._next < end:
            found = self._next not in outside and self._characters(ids, content[self._length :], whole=whole)
            if found is None:
                return taken
            if found is not False:
                self._length += found
                self._last = self._next
            if found is not False or self._every:
                taken.append(self._next)
            self._next += 1
        if whole and self._every:
            taken.extend(range(self._next, len(ids)))
        return taken

    def _characters(self, ids: Sequence[int], left: str, *, whole: bool) -> int | bool | None:
        """How many characters the next token adds to a content of which `left` is left. False if it is no part of it;
        None if that is not known yet."""
        first = max(0, self._next - CONTEXT)
        place = self._next
        # By its length, as the end of the text before can change: a part of a character is shown in its place.
        before = self._rendering.decode(ids[first:place])
        text = self._added(ids, first, len(before), whole=whole)
        if text is None:
            return None
        if not self._length and not left.startswith(text):
            # The space before a content is not a part of it.
            text = text.lstrip()
            if not text:
                return False if left or whole else None
        if not text:
            # It adds the rest of a character.
            return 0 if self._last == place - 1 else False
        if len(text) <= len(left):
            return len(text) if left.startswith(text) else False
        if not text.startswith(left):
            return False
        if not whole:
            return None
        # A stop text within the token has ended the content.
        return len(left) or False

    def _added(self, ids: Sequence[int], first: int, before: int, *, whole: bool) -> str | None:
        """The text that the next token adds, with its last character whole if later tokens complete it; None if these
        may not be sampled yet.

        Args:
            first: where in `ids` decoding begins.
            before: how many characters come before the token.
        """
        place = self._next
        text = self._rendering.decode(ids[first : place + 1])[before:]
        for end in range(place + 2, place + 2 + _MOST_PARTS):
            if not text.endswith(_PARTIAL):
                return text
            if end > len(ids):
                return text if whole else None
            text = self._rendering.decode(ids[first:end])[before : before + len(text)]
        return text


def tokens_outside(
    rendering: Rendering, request: ChatRequest, choice: Choice, parsed: ParsedMessage, ids: Any
) -> Set[int]:
    """The places of an answer's tokens that no content is made of."""
    if choice.grammar and not (parsed.tool_calls or parsed.malformed):
        # JSON of a schema is a text, whatever it spells.
        return rendering.reasoning_places(ids, parsed, prompt_ids=choice.prompt)
    return rendering.tokens_outside(ids, parsed, request.tools, forced_ids=choice.forced, prompt_ids=choice.prompt)


def content_logprobs(
    reply: Reply, rendering: Rendering, request: ChatRequest, *, every: bool = False
) -> list[dict[str, Any]]:
    """The log-probs of a whole answer's content, as OpenAI has them; with `every`, of all of its tokens."""
    assert reply.choice is not None
    assert reply.parsed is not None
    ids = reply.completion.token_ids.tolist()
    content = reply.message.get("content") or ""
    outside = tokens_outside(rendering, request, reply.choice, reply.parsed, ids)
    places = ContentTokens(rendering, every=every).take(ids, content, outside, whole=True)
    return logprob_entries(reply.completion, rendering, places)
