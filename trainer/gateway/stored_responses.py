"""The responses of an attempt that a later request can continue by `previous_response_id`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from agl.trainer.gateway.errors import RequestError

Message = Mapping[str, Any]
Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """A response that can be continued.

    Attributes:
        previous: the response that it continues.
        messages: those that it added to the conversation, the answer last.
    """

    previous: StoredResponse | None
    messages: tuple[Message, ...]

    def conversation(self) -> list[Message]:
        """All messages up to and including the answer, without instructions."""
        turns: list[StoredResponse] = []
        turn: StoredResponse | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return [m for turn in reversed(turns) for m in turn.messages]


@dataclass(slots=True)
class StoredResponses:
    """What an attempt's requests can refer to: its stored responses, and their output items by id."""

    items: dict[str, Item] = field(default_factory=dict)
    _responses: dict[str, StoredResponse] = field(default_factory=dict)
    _messages: dict[bytes, Message] = field(default_factory=dict)
    """By their JSON's hash: a client that sends its whole history at each turn would fill the memory with copies."""

    def get(self, response_id: str) -> StoredResponse:
        """A stored response.

        Raises:
            RequestError: 400, as OpenAI has it: this attempt has no such response, or it was not to be stored.
        """
        if response_id not in self._responses:
            raise RequestError(
                400,
                f"Previous response with id {response_id!r} not found; a response is known within its own rollout, "
                "unless it failed or was requested with store=false",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._responses[response_id]

    def add(
        self, response_id: str, previous: StoredResponse | None, messages: Sequence[Message], items: Sequence[Item]
    ) -> None:
        """Make a response continuable.

        Args:
            response_id: of the response.
            previous: the response that it continues.
            messages: those that it added, the answer last.
            items: its output.
        """
        hashed = [(hashlib.blake2b(orjson.dumps(m), digest_size=16).digest(), m) for m in messages]
        shared = tuple(self._messages.setdefault(key, m) for key, m in hashed)
        self._responses[response_id] = StoredResponse(previous, shared)
        self.items.update((item["id"], item) for item in items)
