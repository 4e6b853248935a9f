"""Model calls over a WebSocket: of OpenAI's Responses and Realtime APIs, and of Google's Live API.

They cannot be routed, because the gateway answers HTTP alone. Each answer is a `chat` span, from the message that
requests it (or, where the provider itself decides when to answer, from the answer's beginning) to the message that ends
it. So a trace shows the call, and training says that it bypassed the gateway.

Patched while rollouts run, where imported: what sends and receives in the client connections of `websockets` (>= 13,
and its legacy client), through which the SDKs of OpenAI and Google and the OpenAI Agents SDK talk; and of
websocket-client, aiohttp, httpx-ws and simple-websocket, with which programs do it by themselves.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl import semconv
from agl.messages import google
from agl.tracing import context
from agl.tracing.client_patches import ClientPatches
from agl.tracing.context import Scope
from agl.tracing.import_hooks import when_imported
from agl.tracing.provider_formats import ResponseAccumulator, request_messages, settings


@dataclass(frozen=True)
class _Client:
    """A library's client connection.

    Attributes:
        name: of the class.
        is_async: whether its methods are.
        url: connection -> its address; None where it is not known.
        sends: the methods that send a message, which is their first argument.
        receives: the one that returns the next.
        text: what is sent or returned -> the message itself.
        opens: the method whose first argument is the address, where the connection does not keep it.
    """

    name: str
    is_async: bool
    url: Callable[[Any], str | None]
    sends: tuple[str, ...] = ("send",)
    receives: str = "recv"
    text: Callable[[Any], Any] = lambda message: message
    opens: str | None = None


def _url_of_protocol(connection: Any) -> str | None:
    uri = connection.protocol.uri
    return f"{'wss' if uri.secure else 'ws'}://{uri.host}:{uri.port}{uri.resource_name}"


def _url_of_legacy(connection: Any) -> str | None:
    return f"{'wss' if connection.secure else 'ws'}://{connection.host}:{connection.port}{connection.path}"


def _url_of_aiohttp(connection: Any) -> str | None:
    return re.sub("^http", "ws", str(connection._response.url))


def _url_of_httpx(connection: Any) -> str | None:
    return None if connection.response is None else re.sub("^http", "ws", str(connection.response.request.url))


def _url_of_simple(connection: Any) -> str | None:
    return f"{'wss' if connection.port == 443 else 'ws'}://{connection.host}:{connection.port}{connection.path}"


def _data(message: Any) -> Any:
    return getattr(message, "data", None)


_httpx_ws = functools.partial(_Client, url=_url_of_httpx, receives="receive", text=_data)
_CLIENTS: dict[str, tuple[_Client, ...]] = {
    "websockets.asyncio.client": (_Client("ClientConnection", True, _url_of_protocol),),
    "websockets.sync.client": (_Client("ClientConnection", False, _url_of_protocol),),
    "websockets.legacy.client": (_Client("WebSocketClientProtocol", True, _url_of_legacy),),
    "websocket._core": (
        _Client(
            "WebSocket",
            False,
            lambda connection: _addresses.get(connection),
            receives="recv_data_frame",
            text=lambda message: _data(message[1]) if isinstance(message, tuple) else message,
            opens="connect",
        ),
    ),
    "aiohttp.client_ws": (
        _Client(
            "ClientWebSocketResponse",
            True,
            _url_of_aiohttp,
            sends=("send_str", "send_bytes"),
            receives="receive",
            text=lambda message: message if isinstance(message, str | bytes) else _data(message),
        ),
    ),
    "httpx_ws._api": (_httpx_ws("WebSocketSession", False), _httpx_ws("AsyncWebSocketSession", True)),
    "simple_websocket.ws": (_Client("Client", False, _url_of_simple, receives="receive"),),
    "simple_websocket.aiows": (_Client("AioClient", True, _url_of_simple, receives="receive"),),
}
"""Module -> its connections."""
_addresses: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Those of connections that do not keep theirs."""
_CLOSED = ("ConnectionClosed", "Disconnect")
"""How the names of the errors begin that the clients raise at the end of a connection, but for "WebSocket"."""
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
        url: its address.
        session: the settings that hold for all of its calls.
        call: the one that is being answered.
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
        call = self.call
        self.call = None
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
_patches = ClientPatches()
_forget: list[Callable[[], None]] = []


def install() -> None:
    """Patch the clients that are or will be imported."""
    _forget.append(when_imported(tuple(_CLIENTS), _patch))


def uninstall() -> None:
    """Restore them."""
    while _forget:
        _forget.pop()()
    _patches.restore()


def _patch(module: str) -> None:
    for client in _CLIENTS[module]:
        cls = getattr(sys.modules[module], client.name, None)
        if cls is None or _patches.has(cls, client.receives):
            continue
        replaced = {**dict.fromkeys(client.sends, _sending), client.receives: _receiving}
        if client.opens is not None:
            replaced[client.opens] = _opening
        for name, around in replaced.items():
            _patches.replace(cls, name, around(getattr(cls, name), client))


def _opening(connect: Callable[..., Any], client: _Client) -> Callable[..., Any]:
    @functools.wraps(connect)
    def opening(self: Any, url: str, *args: Any, **kwargs: Any) -> Any:
        _addresses[self] = url
        return connect(self, url, *args, **kwargs)

    return opening


def _sending(send: Callable[..., Any], client: _Client) -> Callable[..., Any]:
    def note(connection: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if context.idle():
            return
        message = args[0] if args else next(iter(kwargs.values()), None)
        if (known := _known(connection, client)) is not None and (data := _json(client.text(message))) is not None:
            known.sent(data)

    @functools.wraps(send)
    def send_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self, args, kwargs)
        return send(self, *args, **kwargs)

    @functools.wraps(send)
    async def send_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self, args, kwargs)
        return await send(self, *args, **kwargs)

    return send_async if client.is_async else send_sync


def _receiving(receive: Callable[..., Any], client: _Client) -> Callable[..., Any]:
    def note(connection: Any, message: Any) -> None:
        if (known := _known(connection, client)) is not None and (data := _json(client.text(message))) is not None:
            known.received(data)

    def failed(connection: Any, error: BaseException) -> None:
        # A reader that stops waiting may read on; of the connection's own errors none has a next message.
        known = _connections.get(connection)
        if known is not None and type(error).__name__.removeprefix("WebSocket").startswith(_CLOSED):
            known.end(error)

    @functools.wraps(receive)
    def receive_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if context.idle() and self not in _connections:
            return receive(self, *args, **kwargs)
        try:
            message = receive(self, *args, **kwargs)
        except Exception as error:
            failed(self, error)
            raise
        note(self, message)
        return message

    @functools.wraps(receive)
    async def receive_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        if context.idle() and self not in _connections:
            return await receive(self, *args, **kwargs)
        try:
            message = await receive(self, *args, **kwargs)
        except Exception as error:
            failed(self, error)
            raise
        note(self, message)
        return message

    return receive_async if client.is_async else receive_sync


def _known(connection: Any, client: _Client) -> _Connection | None:
    """What is known of a connection; None if it does not lead to a model."""
    known = _connections.get(connection)
    if known is None:
        try:
            url = urllib.parse.urlsplit(client.url(connection) or "")
        except (AttributeError, ValueError):
            return None
        if not (url.path.endswith(("/responses", "/realtime")) or "BidiGenerateContent" in url.path):
            return None
        query = dict(urllib.parse.parse_qsl(url.query))
        session = {"model": query["model"]} if "model" in query else {}
        known = _connections[connection] = _Connection(f"{url.scheme}://{url.netloc}{url.path}", session)
        # Who leaves a connection in mid-answer reads no message that would end the call.
        weakref.finalize(connection, known.end).atexit = False
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
