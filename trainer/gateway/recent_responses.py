"""The responses of an application that a later request can continue: the latest ones, as it may make any number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.stored_responses import Item, Message, StoredResponse, StoredResponses

GENERATION = 4096
"""At least so many of the latest responses are known, and at most twice as many."""


class RecentResponses(StoredResponses):
    """The responses of one application."""

    def __init__(self) -> None:
        super().__init__()
        self._older = StoredResponses()

    def get(self, response_id: str) -> StoredResponse:
        """As of any stored responses."""
        try:
            return super().get(response_id)
        except RequestError:
            return self._older.get(response_id)

    def find(self, response_id: str) -> StoredResponse:
        """As of any stored responses."""
        try:
            return super().find(response_id)
        except RequestError:
            return self._older.find(response_id)

    def delete(self, response_id: str) -> None:
        """As of any stored responses."""
        if response_id in self._responses:
            super().delete(response_id)
        else:
            self._older.delete(response_id)

    def add(
        self, response: Item, previous: StoredResponse | None, messages: Sequence[Message], items: Sequence[Item]
    ) -> None:
        """As of any stored responses; the oldest are forgotten."""
        if len(self._responses) >= GENERATION:
            self._older, young = StoredResponses(), StoredResponses()
            for field in fields(StoredResponses):
                setattr(self._older, field.name, getattr(self, field.name))
                setattr(self, field.name, getattr(young, field.name))
            # What is looked up there are the ids of a request's own items, which are few.
            self.items.update(dict(list(self._older.items.items())[-GENERATION:]))
        super().add(response, previous, messages, items)
