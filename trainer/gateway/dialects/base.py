"""A dialect: an HTTP API over the gateway, with its requests, answers and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from agl.trainer.gateway.access import Access, PendingRequest
from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, ServedPolicy
from agl.trainer.gateway.dialects.model_forms import ModelForms
from agl.trainer.gateway.errors import RequestError

Body = TypeVar("Body")


@dataclass(frozen=True, slots=True, eq=False)
class DialectRequest(Generic[Body]):
    """A request of a dialect.

    Attributes:
        body: its fields.
        chat: the gateway's request.
        stream: whether the answer is streamed.
    """

    body: Body
    chat: ChatRequest
    stream: bool


class Stream(Protocol):
    """An answer in parts, such as server-sent events, encoded."""

    def push(self, choice: Choice) -> Iterable[bytes]:
        """Events for what was sampled of a choice since the last call."""
        ...

    def finish(self, replies: Sequence[Reply]) -> Iterable[bytes]:
        """Events for the end of the answer."""
        ...

    def fail(self, error: RequestError) -> Iterable[bytes]:
        """Events for an answer that broke off."""
        ...


Request = TypeVar("Request", bound=DialectRequest[Any])


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Request]):
    """An HTTP API over the gateway.

    Attributes:
        id_prefix: of response ids.
        read: the JSON of a request's body and its attempt -> the request; raises RequestError, naming the field at
            fault.
        answer: the replies -> the body of the HTTP response.
        stream: makes the stream of an answer, when its first tokens have been sampled.
        error_body: an error in the API's form, with the id of its request where the form has one.
        models: policies in the API's form.
        stream_type: media type of its streams.
        request_id_header: the header in which its clients look for a request's id.
    """

    id_prefix: str
    read: Callable[[Any, Access], Request]
    answer: Callable[[PendingRequest, ServedPolicy, Request, Sequence[Reply]], bytes]
    stream: Callable[[PendingRequest, ServedPolicy, Request], Stream]
    error_body: Callable[[RequestError, str | None], dict[str, Any]]
    models: ModelForms
    stream_type: str = "text/event-stream"
    request_id_header: str = "x-request-id"
