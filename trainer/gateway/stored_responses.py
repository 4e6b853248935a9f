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
        response: as the API has it.
        input: the items of its request.
    """

    previous: StoredResponse | None
    messages: tuple[Message, ...]
    response: Item
    input: tuple[Item, ...]

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
    _shared: dict[bytes, Any] = field(default_factory=dict)
    """Messages, tools and instructions by their JSON's hash: a client that sends them at each turn would fill the
    memory with copies."""

    def get(self, response_id: str) -> StoredResponse:
        """A stored response.

        Raises:
            RequestError: 400, as OpenAI has it: there is no such response, or it was not to be stored, or it failed.
        """
        stored = self._responses.get(response_id)
        if stored is None or stored.response.get("status") == "failed":
            raise RequestError(
                400,
                f"Previous response with id {response_id!r} not found; a response is known within its own rollout, "
                "unless it failed or was requested with store=false",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return stored

    def find(self, response_id: str) -> StoredResponse:
        """A stored response, for a client that wants it back.

        Raises:
            RequestError: 404, this attempt has no such response, or it was not to be stored, or it was deleted.
        """
        if response_id not in self._responses:
            raise RequestError(404, f"Response with id {response_id!r} not found.", code="not_found")
        return self._responses[response_id]

    def add(
        self, response: Item, previous: StoredResponse | None, messages: Sequence[Message], items: Sequence[Item]
    ) -> None:
        """Make a response continuable.

        Args:
            response: as the API has it.
            previous: the response that it continues.
            messages: those that it added, the answer last.
            items: of its request.
        """
        shared = tuple(map(self._share, messages))
        stored = {**response, **{name: self._share(response[name]) for name in ("instructions", "tools", "text")}}
        self._responses[response["id"]] = StoredResponse(previous, shared, stored, tuple(map(self._share, items)))
        self.items.update((item["id"], item) for item in response["output"])

    def delete(self, response_id: str) -> None:
        """Forget a response; what continues it already is unchanged. Raises as `find`."""
        for item in self.find(response_id).response["output"]:
            self.items.pop(item["id"], None)
        del self._responses[response_id]

    def _share(self, value: Any) -> Any:
        """`value`, or an equal one that is stored."""
        try:
            key = hashlib.blake2b(orjson.dumps(value), digest_size=16).digest()
        except TypeError:  # an integer of more than 64 bits
            return value
        return self._shared.setdefault(key, value)
