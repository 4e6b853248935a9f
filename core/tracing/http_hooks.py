"""Model requests that no SDK's hook sees: of litellm, to Google's Interactions API, of a program's own `httpx.post`.

They cannot be routed, as nobody but the client knows what its answer must look like. Each becomes a `chat` span, so
that none is missing without a word: a trace shows it, and training says that it bypassed the gateway.

Patched while rollouts run, where imported: `Client.send` and `AsyncClient.send` of httpx and httpx2,
`requests.Session.send`, `aiohttp.ClientSession._request`, `urllib.request.OpenerDirector.open`,
`urllib3.connectionpool.HTTPConnectionPool.urlopen`, `http.client.HTTPConnection.request`.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from agl import semconv
from agl.tracing import context
from agl.tracing.client_patches import ClientPatches
from agl.tracing.context import Scope
from agl.tracing.import_hooks import when_imported

PATHS = (
    "/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/openai/responses",
    "/v1/messages",
    "/v1beta/interactions",
    "/agents/completions",
    "/fim/completions",
    "/v1/chat",
    "/v2/chat",
    "/runs",
    "/api/chat",
    "/api/generate",
)
"""A POST of an object with a `model` to a path that ends so is a model request: those of OpenAI, Anthropic, Google,
Mistral, Cohere, OpenAI's assistants (which may name the assistant alone) and Ollama, in this order."""
GOOGLE = (":generateContent", ":streamGenerateContent")
"""Google's methods, whose paths hold the model."""
_IN_PATH = re.compile(
    r"/model/([^/]+)/(?:invoke|invoke-with-response-stream|converse|converse-stream)$"  # Amazon Bedrock
    r"|/models/([^/:]+):(?:rawPredict|streamRawPredict)$"  # other makers' models on Vertex AI
)
"""Other paths that hold the model."""


class Request(NamedTuple):
    """What a client is about to send; `body` is JSON text, an object, or something that cannot be read."""

    method: str
    url: str
    body: Any


def _of_httpx(_client: Any, request: Any, **_: Any) -> Request:
    return Request(request.method, str(request.url), getattr(request, "_content", None))


def _of_requests(_session: Any, request: Any, **_: Any) -> Request:
    return Request(request.method or "", request.url or "", request.body)


def _of_aiohttp(_session: Any, method: str, url: Any, *, data: Any = None, json: Any = None, **_: Any) -> Request:
    return Request(method, str(url), data if json is None else json)


def _of_urllib(_opener: Any, url: Any, data: Any = None, *_: Any, **__: Any) -> Request:
    if isinstance(url, str):
        return Request("GET" if data is None else "POST", url, data)
    return Request(url.get_method(), url.full_url, url.data if data is None else data)


def _of_urllib3(pool: Any, method: str, url: str, body: Any = None, *_: Any, **__: Any) -> Request:
    return Request(method, f"{pool.scheme}://{pool.host}:{pool.port}{url}", body)


def _of_http_client(connection: Any, method: str, url: str, body: Any = None, *_: Any, **__: Any) -> Request:
    scheme = "https" if hasattr(connection, "_context") else "http"
    return Request(method, f"{scheme}://{connection.host}:{connection.port}{url}", body)


Reader = Callable[..., Request]
_HTTPX: tuple[tuple[str, str, Reader, bool], ...] = (
    ("Client", "send", _of_httpx, False),
    ("AsyncClient", "send", _of_httpx, True),
)
_CLIENTS: dict[str, tuple[tuple[str, str, Reader, bool], ...]] = {
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "requests": (("Session", "send", _of_requests, False),),
    "aiohttp": (("ClientSession", "_request", _of_aiohttp, True),),
    "urllib.request": (("OpenerDirector", "open", _of_urllib, False),),
    # boto3's. What lies within a call of the above is part of it.
    "urllib3.connectionpool": (("HTTPConnectionPool", "urlopen", _of_urllib3, False),),
    "http.client": (("HTTPConnection", "request", _of_http_client, False),),
}
"""Module -> class, method, what reads its arguments, whether it is async."""

_seen: ContextVar[bool] = ContextVar("agl_request_seen", default=False)
_patches = ClientPatches()
_forget: list[Callable[[], None]] = []


@contextmanager
def seen() -> Iterator[None]:
    """A block whose requests an SDK's hook has seen already."""
    token = _seen.set(True)
    try:
        yield
    finally:
        _seen.reset(token)


def install() -> None:
    """Patch the clients that are or will be imported."""
    _forget.append(when_imported(tuple(_CLIENTS), _patch))


def uninstall() -> None:
    """Restore them."""
    while _forget:
        _forget.pop()()
    _patches.restore()


def _patch(module: str) -> None:
    for class_name, name, read, is_async in _CLIENTS[module]:
        cls = getattr(sys.modules[module], class_name, None)
        if cls is None or _patches.has(cls, name):
            continue
        original = getattr(cls, name)
        label = f"{module}.{class_name}"
        ours = _async(original, read, label) if is_async else _sync(original, read, label)
        _patches.replace(cls, name, ours)


def _sync(original: Callable[..., Any], read: Reader, label: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def send(*args: Any, **kwargs: Any) -> Any:
        scope = None if context.idle() else _begin(label, read, args, kwargs)
        if scope is None:
            return original(*args, **kwargs)
        with context.within(scope):
            return original(*args, **kwargs)

    return send


def _async(original: Callable[..., Any], read: Reader, label: str) -> Callable[..., Any]:
    @functools.wraps(original)
    async def send(*args: Any, **kwargs: Any) -> Any:
        scope = None if context.idle() else _begin(label, read, args, kwargs)
        if scope is None:
            return await original(*args, **kwargs)
        with context.within(scope):
            return await original(*args, **kwargs)

    return send


def _begin(label: str, read: Reader, args: Any, kwargs: Any) -> Scope | None:
    """The scope of a model request that nobody else has seen; None for all other requests."""
    here = context.current()
    if here is None or _seen.get() or context.model_call() is not None:
        return None
    try:
        request = read(*args, **kwargs)
        model = _model(request)
    except (AttributeError, TypeError, ValueError):
        return None  # not the arguments that this client takes
    gateway = here.rollout.gateway_url
    if model is None or (gateway is not None and request.url.startswith(gateway)):
        return None
    facts = {semconv.REQUEST_MODEL: model, semconv.CLIENT: label, semconv.URL: request.url.partition("?")[0]}
    return context.start(semconv.CHAT, model, attributes=facts)


def _model(request: Request) -> str | None:
    """The model that a request asks; None if it asks none."""
    path = urllib.parse.urlsplit(request.url).path.rstrip("/")
    if request.method.upper() != "POST":
        return None
    if path.endswith(GOOGLE):
        return path.rpartition("/")[2].partition(":")[0]
    if (found := _IN_PATH.search(path)) is not None:
        return urllib.parse.unquote(found[1] or found[2])
    if not path.endswith(PATHS):
        return None
    body = json.loads(request.body) if isinstance(request.body, str | bytes | bytearray) else request.body
    model = (body.get("model") or body.get("assistant_id")) if isinstance(body, dict) else None
    return model if isinstance(model, str) else None
