"""Model calls over a WebSocket: of OpenAI's Responses and Realtime APIs, and of Google's Live API.

They cannot be routed, because the gateway answers HTTP alone. Each answer is a `chat` span, from the message that
requests it (or, where the provider itself decides when to answer, from the answer's beginning) to the message that ends
it. So a trace shows the call, and training says that it bypassed the gateway.

Patched while rollouts run, where imported: `send` and `recv` of the client connections of `websockets` (>= 13), through
which the SDKs of OpenAI and Google and the OpenAI Agents SDK talk.
"""

from __future__ import annotations

import functools
import json
import sys
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl import semconv
from agl.messages import google
from agl.tracing import context
from agl.tracing.context import Scope
from agl.tracing.import_hooks import when_imported
from agl.tracing.provider_formats import ResponseAccumulator, request_messages, settings

_MODULES = {"websockets.asyncio.client": True, "websockets.sync.client": False}
"""Module -> whether its connections are async."""
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.done", "error"})


@dataclass(eq=False)
class _Call:
    """A call whose answer has not ended.

    Attributes:
        own: whether the scope is the call's own, and not a framework's.
    """

    scope: Scope
    own: bool
    answer: ResponseAccumulator = field(default_factory=ResponseAccumulator)


@dataclass(eq=False)
class _Connection:
    """What is known of a connection to a model.

    Attributes:
        url: its address. session: the settings that hold for all of its calls. call: the one that is being answered.
    """

    url: str
    session: dict[str, Any]
    call: _Call | None = None

    def sent(self, message: Mapping[str, Any]) -> None:
        """Note what a message asks for."""
        kind = message.get("type")
        if kind == "session.update":
            self.session |= _mapping(message.get("session"))
        elif kind == "response.create":
            # The Realtime API has the request's fields in an object.
            self._begin({**self.session, **message, **_mapping(message.get("response"))})
        elif "setup" in message:
            setup = google.camel(message["setup"])
            self.session |= {**_mapping(setup.get("generationConfig")), "model": setup.get("model")}
        elif content := google.camel(message).get("clientContent"):
            if google.camel(content).get("turnComplete", True):
                self._begin(self.session)
        elif google.camel(message).get("toolResponse"):
            self._begin(self.session)

    def received(self, message: Mapping[str, Any]) -> None:
        """Note what a message answers; the call ends with the last."""
        kind = message.get("type")
        if self.call is None and (kind == "response.created" or google.camel(message.get("serverContent"))):
            self._begin(self.session)
        if (call := self.call) is None:
            return
        ended = kind in _ENDS
        if isinstance(kind, str):
            call.answer.event(message)
        else:
            content = google.camel(message.get("serverContent"))
            calls = _mapping(message.get("toolCall")).get("functionCalls") or []
            turn = content.get("modelTurn") or {"role": "model", "parts": [{"functionCall": each} for each in calls]}
            call.answer.event({**message, "candidates": [{"content": turn}]})
            ended = bool(calls or content.get("turnComplete") or content.get("interrupted"))
        if ended:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """End the open call, if there is one."""
        call, self.call = self.call, None
        if call is not None and not call.scope.ended:
            facts = call.answer.facts(call.scope.rollout.capture_content)
            if call.own:
                context.end(call.scope, error=error or call.answer.error, attributes=facts)
            else:
                call.scope.span.set_attributes(facts)

    def _begin(self, body: Mapping[str, Any]) -> None:
        self.end()
        here = context.current()
        if here is None:
            return
        model = str(body.get("model") or "").removeprefix("models/")
        facts = {
            semconv.REQUEST_MODEL: model or None,
            semconv.CLIENT: "websockets",
            semconv.URL: self.url,
            **settings(body),
            semconv.REQUEST_STREAM: True,
        }
        chat = context.model_call()
        if own := chat is None:
            before = context.snapshot()
            chat = context.start(semconv.CHAT, model, attributes=facts)
            # The call ends in another message, not in a block: what follows here does not lie within it.
            context.restore(before)
            if chat is None:
                return
        chat.wire_calls += 1
        chat.span.set_attributes({**facts, semconv.WIRE_CALLS: chat.wire_calls})
        if here.rollout.prompts and here.rollout.capture_content:
            chat.span.set_attributes(request_messages(body))
        self.call = _Call(chat, own)


_connections: weakref.WeakKeyDictionary[Any, _Connection] = weakref.WeakKeyDictionary()
_patches: list[tuple[Any, str, Any]] = []
_forget: list[Callable[[], None]] = []


def install() -> None:
    """Patch the clients that are or will be imported."""
    _forget.append(when_imported(tuple(_MODULES), _patch))


def uninstall() -> None:
    """Restore them; where another library patched over ours, ours stays inside and does nothing outside a rollout."""
    while _forget:
        _forget.pop()()
    for patch in list(_patches):
        cls, name, ours = patch
        if vars(cls).get(name) is ours:
            delattr(cls, name)
            _patches.remove(patch)


def _patch(module: str) -> None:
    cls = getattr(sys.modules[module], "ClientConnection", None)
    if cls is None or any(patched is cls for patched, *_ in _patches):
        return
    # The methods are those of a base class, which servers have, too.
    for name, around in (("send", _sending), ("recv", _receiving)):
        ours = around(getattr(cls, name), is_async=_MODULES[module])
        _patches.append((cls, name, ours))
        setattr(cls, name, ours)


def _sending(send: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    def note(connection: Any, message: Any) -> None:
        if (known := _known(connection)) is not None and (data := _json(message)) is not None:
            known.sent(data)

    @functools.wraps(send)
    def send_sync(self: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        if not context.idle():
            note(self, message)
        return send(self, message, *args, **kwargs)

    @functools.wraps(send)
    async def send_async(self: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        if not context.idle():
            note(self, message)
        return await send(self, message, *args, **kwargs)

    return send_async if is_async else send_sync


def _receiving(recv: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    def note(connection: Any, message: Any) -> None:
        if (known := _known(connection)) is not None and (data := _json(message)) is not None:
            known.received(data)

    def failed(connection: Any, error: BaseException) -> None:
        # A reader that stops waiting may read on; of the connection's own errors none has a next message.
        if type(error).__name__.startswith("ConnectionClosed") and (known := _connections.get(connection)) is not None:
            known.end(error)

    @functools.wraps(recv)
    def recv_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if context.idle() and self not in _connections:
            return recv(self, *args, **kwargs)
        try:
            message = recv(self, *args, **kwargs)
        except Exception as error:
            failed(self, error)
            raise
        note(self, message)
        return message

    @functools.wraps(recv)
    async def recv_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        if context.idle() and self not in _connections:
            return await recv(self, *args, **kwargs)
        try:
            message = await recv(self, *args, **kwargs)
        except Exception as error:
            failed(self, error)
            raise
        note(self, message)
        return message

    return recv_async if is_async else recv_sync


def _known(connection: Any) -> _Connection | None:
    """What is known of a connection; None if it does not lead to a model."""
    known = _connections.get(connection)
    if known is None:
        uri = getattr(getattr(connection, "protocol", None), "uri", None)
        path = getattr(uri, "path", "")
        if uri is None or not (path.endswith(("/responses", "/realtime")) or "BidiGenerateContent" in path):
            return None
        query = dict(urllib.parse.parse_qsl(uri.query))
        url = f"{'wss' if uri.secure else 'ws'}://{uri.host}:{uri.port}{path}"
        known = _connections[connection] = _Connection(url, {"model": query["model"]} if "model" in query else {})
    return known


def _json(message: Any) -> Mapping[str, Any] | None:
    """A message's object; None for sound and for what is no object."""
    try:
        data = json.loads(message)
    except (TypeError, ValueError):
        return None
    return data if isinstance(data, Mapping) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
