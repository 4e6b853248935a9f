"""An attempt's conversations: which earlier call a request continues, or why it continues none.

Invariant: a request continues a call only if its messages are that call's messages, the assistant message as it was
returned, and then new ones. Everything else is a new conversation or a fork with a cause; nothing is repaired.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from agl.mdp import IntArray

Message = Mapping[str, Any]


class ForkCause(StrEnum):
    """Why a conversation that went on could not be continued token for token."""

    HISTORY_REWRITTEN = "history_rewritten"
    ASSISTANT_REWRITTEN = "assistant_rewritten"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE = "template"


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A finished call that can be continued.

    Attributes:
        call_id: of the call. prompt_ids, response_ids: int32, exactly as sampled.
        digests: of its messages, the assistant's reply last. tools: digest of its tools and policy.
        session: id of the conversation, shared by all turns that continue one another.
    """

    call_id: str
    prompt_ids: IntArray
    response_ids: IntArray
    digests: tuple[bytes, ...]
    tools: bytes
    session: str


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a request stands.

    Attributes:
        parent: the turn it continues; None if it continues none.
        new: index of the first message that the parent does not hold.
        cause: why not, if the conversation went on without a parent; detail says where.
        digests, tools: of the request, for `Sessions.remember`.
    """

    parent: Turn | None
    new: int
    cause: ForkCause | None
    detail: str | None
    digests: tuple[bytes, ...]
    tools: bytes


@dataclass(slots=True)
class Sessions:
    """The turns of one attempt."""

    turns: dict[bytes, Turn] = field(default_factory=dict)

    def place(self, policy: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> Place:
        """Find the longest earlier conversation that this request extends."""
        digests = tuple(map(digest, messages))
        seed = _hash(orjson.dumps([policy, list(tools or ())], option=orjson.OPT_SORT_KEYS))
        chain = _chain(seed, digests)
        for n in range(len(digests) - 1, 0, -1):
            turn = self.turns.get(chain[n])
            if turn is not None:
                if any(m.get("role") == "assistant" for m in messages[n:]):
                    detail = f"message {n} or later is an assistant message that was not sampled here"
                    return Place(None, 0, ForkCause.ASSISTANT_REWRITTEN, detail, digests, seed)
                return Place(turn, n, None, None, digests, seed)
        cause, detail = self._cause(messages, digests, seed)
        return Place(None, 0, cause, detail, digests, seed)

    def remember(
        self, place: Place, call_id: str, session: str, prompt_ids: IntArray, response_ids: IntArray, reply: Message
    ) -> None:
        """Make a finished call continuable."""
        digests = (*place.digests, digest(reply))
        key = _chain(place.tools, digests)[-1]
        self.turns[key] = Turn(call_id, prompt_ids, response_ids, digests, place.tools, session)

    def _cause(
        self, messages: Sequence[Message], digests: tuple[bytes, ...], seed: bytes
    ) -> tuple[ForkCause | None, str | None]:
        """Tell a fork from a new conversation: without an assistant message there was nothing to continue."""
        if not self.turns or not any(m.get("role") == "assistant" for m in messages):
            return None, None
        for turn in self.turns.values():
            if turn.tools != seed and digests[: len(turn.digests)] == turn.digests:
                return ForkCause.TOOLS_CHANGED, "the tools are not those of the turn before"
        common = max(_common(digests, turn.digests) for turn in self.turns.values())
        if common < len(messages):
            role = messages[common].get("role", "?")
            cause = ForkCause.ASSISTANT_REWRITTEN if role == "assistant" else ForkCause.HISTORY_REWRITTEN
            return cause, f"message {common} ({role}) is not the one seen before"
        return ForkCause.HISTORY_REWRITTEN, "messages were dropped"


def digest(message: Message) -> bytes:
    """A hash of what a message says, equal for every way in which clients echo the same message.

    Clients re-serialise a tool call's JSON arguments, turn "" into null, split text into parts, drop the reasoning and
    add fields of their own; none of that changes what was said.
    """
    role = message.get("role")
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments)
            except orjson.JSONDecodeError:
                pass
        calls.append([call.get("id"), function.get("name"), arguments])
    said = [role, text_of(message.get("content")), calls, message.get("tool_call_id") if role == "tool" else None]
    return _hash(orjson.dumps(said, option=orjson.OPT_SORT_KEYS))


def text_of(content: Any) -> str:
    """A message's content as one text; parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(p if isinstance(p, str) else str(p.get("text", "")) for p in content)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _chain(seed: bytes, digests: Sequence[bytes]) -> list[bytes]:
    """Running hash: entry n stands for the first n messages."""
    chain = [seed]
    for d in digests:
        chain.append(_hash(chain[-1] + d))
    return chain


def _common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
