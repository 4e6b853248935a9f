"""An attempt's conversations: which earlier call a request continues, or why it continues none.

Invariant: a request continues a call only if its messages are that call's messages, the assistant message that was
returned, and then new ones. Everything else is a new conversation or a fork with a cause; nothing is repaired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Any

import orjson

from agl.mdp.types import IntArray
from agl.trainer.gateway.tokens import TokenBuffer
from agl.trainer.rendering.digests import digest, hash_of, text_of

Message = Mapping[str, Any]

DISTINCTIVE_LENGTH = 8
"""An answer of at least this many characters that appears in a request came from here; a shorter one can be chance."""


class ForkCause(StrEnum):
    """Why the next request of a conversation could not be continued token for token."""

    TRIMMED = "trimmed"
    """Messages are left out."""
    SUMMARISED = "summarised"
    """Messages are left out, and fewer new ones are in their place."""
    SYSTEM_CHANGED = "system_changed"
    """Only the system prompt is another one."""
    HISTORY_REWRITTEN = "history_rewritten"
    """A message is another one, or an earlier state of the conversation is taken up again."""
    ASSISTANT_REWRITTEN = "assistant_rewritten"
    """An answer is not the sampled one, or was not sampled here."""
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE = "template"
    """The chat template writes earlier messages otherwise once others follow."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A finished call that can be continued.

    Attributes:
        call_id: of the call.
        prompt_ids, response_ids: int32, exactly as sampled.
        session: id of the conversation, shared by all turns that continue one another.
        buffer: what `prompt_ids` is a view of; None of a conversation's first.
    """

    call_id: str
    prompt_ids: IntArray
    response_ids: IntArray
    session: str
    buffer: TokenBuffer | None = None

    def shared(self, prompt_ids: IntArray) -> tuple[TokenBuffer, IntArray]:
        """The prompt of a call that continues this one, kept once with this one's: its buffer, and the view."""
        if self.buffer is not None:
            return self.buffer.extended(self.prompt_ids.size, prompt_ids)
        buffer = TokenBuffer(prompt_ids)
        return buffer, buffer.view(prompt_ids.size)


@dataclass(frozen=True, slots=True, eq=False)
class SessionMatch:
    """How a request relates to the attempt's earlier calls.

    Attributes:
        parent: the turn it continues; None if it continues none.
        new: index of the first message that the parent does not hold.
        cause: why an earlier conversation is not continued; None if it is, or if the conversation is new.
        detail: the cause in words, with the message at fault.
        digests: of its messages.
        chain: entry n is a hash of the first n messages.
        tools: digest of its policy and tools.
        answers: index of each message that is an answer of this attempt -> id of the call that gave it.
        agent: that sent it.
        buffer: of its prompt, once that is rendered and continues a call.
    """

    parent: Turn | None
    new: int
    cause: ForkCause | None
    detail: str | None
    digests: tuple[bytes, ...]
    chain: tuple[bytes, ...]
    tools: bytes
    answers: Mapping[int, str] = field(default_factory=dict)
    agent: str | None = None
    buffer: TokenBuffer | None = None


@dataclass(slots=True)
class Sessions:
    """The turns of one attempt."""

    _turns: dict[bytes, dict[bytes, Turn]] = field(default_factory=dict)
    """Chain entry of a conversation that ends with a sampled answer -> digest of policy and tools -> turn."""
    _prompts: dict[bytes, str | None] = field(default_factory=dict)
    """Chain entry of a whole request -> the agent that sent it last."""
    _prefixes: set[bytes] = field(default_factory=set)
    """Chain entries of every beginning of every conversation."""
    _replies: dict[bytes, set[bytes]] = field(default_factory=dict)
    """Digest of a sampled answer -> digests of the messages that it followed."""
    _answered: dict[bytes, str] = field(default_factory=dict)
    """Digest of a sampled answer -> id of the latest call that gave it."""
    _tool_calls: set[str] = field(default_factory=set)
    """Ids of the tool calls in sampled answers."""
    _conversations: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    """Session -> digests of its messages, at its latest turn."""
    _owners: dict[bytes, str] = field(default_factory=dict)
    """Digest of a message -> the session that held it last."""

    def match(
        self, policy: str, messages: Sequence[Message], tools: Sequence[Any] | None, agent: str | None = None
    ) -> SessionMatch:
        """Find the longest earlier conversation that this request extends."""
        digests = tuple(map(digest, messages))
        chain = _chain(digests)
        tools_digest = hash_of(orjson.dumps([policy, list(tools or ())], option=orjson.OPT_SORT_KEYS))
        parent = None
        new = 0
        cause = None
        detail = None
        for n in range(len(digests) - 1, 0, -1):
            turns = self._turns.get(chain[n])
            if turns is None:
                continue
            if any(m.get("role") == "assistant" for m in messages[n:]):
                cause, detail = self._rewritten(messages, digests, chain)
            elif tools_digest in turns:
                parent = turns[tools_digest]
                new = n
            else:
                cause = ForkCause.TOOLS_CHANGED
                detail = "the tools are not those of the turn before"
            break
        else:
            known = self._known_prefix(chain)
            if self._is_known(messages, digests, chain):
                cause, detail = self._rewritten(messages, digests, chain)
            elif known < len(messages) and chain[known] in self._prompts and self._prompts[chain[known]] == agent:
                # Its own earlier request, and other messages where its answer was: all of the past became a summary.
                shape = self._compacted(messages, digests)
                cause, detail = shape if shape and shape[0] is ForkCause.SUMMARISED else (None, None)
        answers = {i: self._answered[d] for i, d in enumerate(digests) if d in self._answered}
        return SessionMatch(parent, new, cause, detail, digests, chain, tools_digest, answers, agent)

    def remember(
        self,
        match: SessionMatch,
        call_id: str,
        session: str,
        prompt_ids: IntArray,
        response_ids: IntArray,
        reply: Message,
    ) -> None:
        """Make a finished call continuable.

        Args:
            match: the result of `match` for the call's request.
            call_id, session: of the call.
            prompt_ids, response_ids: int32, exactly as sampled.
            reply: the assistant message that the client gets.
        """
        reply_digest = digest(reply)
        end = hash_of(match.chain[-1] + reply_digest)
        self._turns.setdefault(end, {})[match.tools] = Turn(call_id, prompt_ids, response_ids, session, match.buffer)
        self._prompts[match.chain[-1]] = match.agent
        self._conversations[session] = (*match.digests, reply_digest)
        self._owners.update(dict.fromkeys(self._conversations[session], session))
        self._prefixes.update(match.chain[1:], (end,))
        self._replies.setdefault(reply_digest, set()).add(match.digests[-1])
        self._answered[reply_digest] = call_id
        self._tool_calls.update(_tool_call_ids(reply))

    def _known_prefix(self, chain: Sequence[bytes]) -> int:
        """How many of the messages are the beginning of an earlier conversation."""
        n = 0
        while n + 1 < len(chain) and chain[n + 1] in self._prefixes:
            n += 1
        return n

    def _is_known(self, messages: Sequence[Message], digests: Sequence[bytes], chain: Sequence[bytes]) -> bool:
        """Whether an earlier conversation continues here; a new one can hold assistant messages too (few-shot)."""
        known = self._known_prefix(chain)
        for i in range(known, len(messages)):
            message = messages[i]
            if not self._tool_calls.isdisjoint(_tool_call_ids(message)):
                return True
            if message.get("role") != "assistant":
                continue
            if i == known and chain[i] in self._prompts:
                return True
            predecessors = self._replies.get(digests[i])
            if predecessors is not None and (
                (i > 0 and digests[i - 1] in predecessors) or len(text_of(message.get("content"))) >= DISTINCTIVE_LENGTH
            ):
                return True
        return False

    def _compacted(self, messages: Sequence[Message], digests: Sequence[bytes]) -> tuple[ForkCause, str] | None:
        """The cause and detail of a fork whose conversation is an earlier one, but for whole messages."""
        # First the one with most of its messages; of equals the one with the latest.
        owners = Counter(self._owners[d] for d in reversed(digests) if d in self._owners)
        conversations = [self._conversations[session] for session, _ in owners.most_common()]
        answers = {d for m, d in zip(messages, digests, strict=True) if m.get("role") == "assistant"}
        answered = any(before[0] == digests[0] and not answers.isdisjoint(before) for before in conversations)
        for before in conversations:
            known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, digests, strict=False)))
            places = {d: i for i, d in enumerate(before)}
            # What follows the last message that both have is new; but where no answer is left, it is in their place.
            last = max((i for i, d in enumerate(digests) if d in places), default=-1)
            there = before[known : places[digests[last]] + 1]
            if known and not answered:
                last = len(digests) - 1
                there = before[known:]
            gone = (Counter(there) - Counter(digests[known : last + 1])).total()
            others = [i for i in range(known, last + 1) if digests[i] not in places]
            if others == [0] and gone <= 1 and messages[0].get("role") in ("system", "developer"):
                return ForkCause.SYSTEM_CHANGED, "message 0 (system) is not the one seen before"
            if len(others) >= gone:
                continue
            left_out = f"{gone} message{'s' if gone > 1 else ''} left out from message {known} on"
            if not others:
                return ForkCause.TRIMMED, left_out
            names = ", ".join(f"message {i} ({messages[i].get('role')})" for i in others[:3])
            return ForkCause.SUMMARISED, f"{left_out}; in their place {names}{', ...' if len(others) > 3 else ''}"
        return None

    def _rewritten(
        self, messages: Sequence[Message], digests: Sequence[bytes], chain: Sequence[bytes]
    ) -> tuple[ForkCause, str]:
        """The cause and detail of a fork: what was compacted, or the first message that differs."""
        known = self._known_prefix(chain)
        if known == len(messages):
            return ForkCause.HISTORY_REWRITTEN, "an earlier state of the conversation was taken up again"
        if compacted := self._compacted(messages, digests):
            return compacted
        if chain[known] in self._turns:
            answer = next(i for i in range(known, len(messages)) if messages[i].get("role") == "assistant")
            # Anything may follow a sampled answer, but for an answer that is not ours.
            if digest(messages[answer]) not in self._replies:
                known = answer
        if messages[known].get("role") != "assistant":
            return (
                ForkCause.HISTORY_REWRITTEN,
                f"message {known} ({messages[known].get('role')}) is not the one seen before",
            )
        if chain[known] in self._prompts:
            return ForkCause.ASSISTANT_REWRITTEN, f"message {known} (assistant) is not the answer that was sampled"
        return ForkCause.ASSISTANT_REWRITTEN, f"message {known} (assistant) was not sampled here"


def _tool_call_ids(message: Message) -> list[str]:
    """The calls that a message makes or answers."""
    ids = [message.get("tool_call_id"), *(call.get("id") for call in message.get("tool_calls") or ())]
    return [i for i in ids if isinstance(i, str)]


def chain_of(messages: Sequence[Message], before: Sequence[bytes] = (b"",)) -> tuple[bytes, ...]:
    """Running hash: entry n stands for the first n messages. `before`: that of the messages before them."""
    return _chain(tuple(map(digest, messages)), before)


def _chain(digests: Sequence[bytes], before: Sequence[bytes] = (b"",)) -> tuple[bytes, ...]:
    chain = [*before]
    for d in digests:
        chain.append(hash_of(chain[-1] + d))
    return tuple(chain)
