"""Routing: inside a rollout, a selected agent's SDK request goes to the gateway; every other request is unchanged.

Where a rollout replaces agents' system prompts, this is done here, too, wherever the request goes.

The openai and anthropic SDKs have one choke point, the client's `request` method, which also sees raw-response posts,
bound methods cached before the patch, and clients made earlier; google-genai's is `_request` of its API client. A
selected request is sent by a separate client, which knows the gateway but none of the user's keys, headers, proxies or
cookies.

Patched, because the SDKs offer no hook: `OpenAI.request`, `AsyncOpenAI.request` (openai >= 1.66, < 4),
`Anthropic.request`, `AsyncAnthropic.request` (anthropic >= 0.50, < 3), `BaseApiClient._request` and `._async_request`
(google-genai >= 1.60, < 4).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib
import inspect
import json
import operator
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from agl import semconv
from agl.messages import google
from agl.tracing import arrivals, background, context, grpc_hooks, http_hooks, offered_tools, websocket_hooks
from agl.tracing.client_patches import ClientPatches
from agl.tracing.context import Scope
from agl.tracing.provider_formats import request_messages, settings
from agl.tracing.system_prompts import NamedTexts, replace_system_prompts
from agl.tracing.usage import reported_usage, usage_facts, usage_fields

GENERATION_PATHS = {
    # The longest first: `/chat/completions` also ends in `/completions`.
    "openai": ("/chat/completions", "/completions", "/responses"),
    "anthropic": ("/messages/count_tokens", "/messages"),
    "google": (*http_hooks.GOOGLE, ":countTokens"),
}
"""A POST to one of these is an LLM call; other requests (files, embeddings) are not looked at."""
COUNTS = ("/messages/count_tokens", ":countTokens")
"""Of these, those whose answer is a number of tokens."""

GENAI = "google.genai"
_SDKS = {
    "openai": (("OpenAI", "request"), ("AsyncOpenAI", "request")),
    "anthropic": (("Anthropic", "request"), ("AsyncAnthropic", "request")),
    GENAI: (("_api_client.BaseApiClient", "_request"), ("_api_client.BaseApiClient", "_async_request")),
}
"""Module -> the class and the method that make its requests, sync and async."""
_ARGUMENTS = dict.fromkeys(_SDKS, ("options", 1, "json_data")) | {GENAI: ("http_request", 0, "data")}
"""Module -> the name and the place of that method's argument with the request, and where this has the body."""

_ALLOWED_HEADERS = frozenset(
    {
        "host",
        "accept",
        "accept-encoding",
        "connection",
        "content-type",
        "content-length",
        "transfer-encoding",
        "user-agent",
        "authorization",
        "traceparent",
        "x-agl-traceparent",
        "anthropic-version",
    }
)
"""Headers that may be sent to the gateway, in addition to the SDK's `x-stainless-*`. The SDKs also read headers,
organisations and keys from the environment and from files; an allow-list cannot miss one of them."""

_TRACEPARENT = "x-agl-traceparent"
"""A copy of our `traceparent`: anthropic 2 and instrumented HTTP clients replace the real one where the user traces."""


class Observer(Protocol):
    """Makes the span of a request that no framework's `chat` span encloses."""

    def started(self, path: str, model: str, wire: Mapping[str, Any]) -> Scope | None:
        """Open the span; `wire` holds attributes for it."""
        ...

    def finished(self, scope: Scope, result: Any) -> Any: ...

    def failed(self, scope: Scope, error: BaseException) -> None: ...


_UNROUTED = (http_hooks, websocket_hooks, grpc_hooks)
"""What records the calls that no SDK's hook sees."""

_lock = threading.Lock()
_installs = 0
_patches = ClientPatches()
_observers: dict[str, Observer] = {}
_sync_clients: dict[str, Any] = {}
_async_clients: dict[tuple[str, asyncio.AbstractEventLoop], Any] = {}


def install() -> None:
    """Patch every installed SDK; in a program that is traced as a whole, those that it has imported so far.

    Such a program calls this again for each SDK that it imports. Calls nest: `uninstall` as often as `install`.
    """
    global _installs
    # Before the lock is taken: what watches imports may switch tracers on, which install again.
    clients = [*client_classes()]
    with _lock:
        _installs += 1
        if _installs == 1:
            for unrouted in _UNROUTED:
                unrouted.install()
        for sdk, is_async, cls, method in clients:
            if not _patches.has(cls, method):
                _patches.replace(cls, method, _patched(sdk, getattr(cls, method), is_async=is_async))


def client_classes() -> Iterator[tuple[str, bool, Any, str]]:
    """(SDK, whether it is async, class, method that is patched) of the SDKs that `install` patches."""
    for sdk, methods in _SDKS.items():
        with contextlib.suppress(ModuleNotFoundError):
            if sdk in sys.modules or not context.has_process_scope():
                module = importlib.import_module(sdk)
                for is_async, (name, method) in enumerate(methods):
                    yield sdk, bool(is_async), operator.attrgetter(name)(module), method


def uninstall() -> None:
    """Restore what the outermost `install` changed."""
    global _installs
    with _lock:
        if _installs == 0:
            return
        _installs -= 1
        if _installs:
            return
        for unrouted in _UNROUTED:
            unrouted.uninstall()
        _patches.restore()
        for client in _sync_clients.values():
            client.close()
        _sync_clients.clear()
        _async_clients.clear()


def observe(sdk: str, observer: Observer | None) -> None:
    """Set or remove the observer of an SDK's requests."""
    if observer is None:
        _observers.pop(sdk, None)
    else:
        _observers[sdk] = observer


def _patched(sdk: str, inherited: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """The method that makes an SDK's requests, with those of a rollout routed."""
    if is_async:

        @functools.wraps(inherited)
        async def request_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            call = None if context.idle() else _routed(sdk, self, args, kwargs)
            if call is None:
                return await inherited(self, *args, **kwargs)
            with call.sending():
                client = call.client_to_send(is_async=True)
                with http_hooks.seen():
                    result = await inherited(client, *call.args, **call.kwargs)
                return call.end(result)

        return request_async

    @functools.wraps(inherited)
    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = None if context.idle() else _routed(sdk, self, args, kwargs)
        if call is None:
            return inherited(self, *args, **kwargs)
        with call.sending():
            client = call.client_to_send(is_async=False)
            with http_hooks.seen():
                result = inherited(client, *call.args, **call.kwargs)
            return call.end(result)

    return request


def _routed(
    sdk: str, client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _RoutedRequest | background.Retrieval | None:
    """The request, if it is an LLM call inside a rollout, or asks for the answer of one; else None."""
    scope = context.current()
    if scope is None or not _installs:
        return None
    name, place, _ = _ARGUMENTS[sdk]
    options = kwargs[name] if name in kwargs else args[place]
    path = _generation_path(sdk, options)
    if path is None:
        observer = _observers.get(sdk)
        finished = None if observer is None else observer.finished
        return background.retrieval(client, args, kwargs, str(options.url), scope.rollout, finished)
    return _RoutedRequest(sdk, client, args, kwargs, options, path, scope)


class _RoutedRequest:
    """One LLM call of an SDK inside a rollout: its destination and its span."""

    def __init__(self, sdk: str, client: Any, args: Any, kwargs: Any, options: Any, path: str, scope: Scope) -> None:
        self.sdk = sdk
        self.client = client
        self.args = args
        self.kwargs = kwargs
        self.options = options
        self.path = path
        self.scope = scope
        self.opened: Scope | None = None
        self.observer = _observers.get(sdk)
        self.url = str(getattr(client, "base_url", None) or options.url).partition("?")[0]
        if sdk == GENAI:
            model = path.rpartition("/")[2].partition(":")[0]
        else:
            model = self.body.get("model") if isinstance(self.body, dict) else None
        wire = {
            **self._settings(),
            semconv.WIRE_CALLS: 1,
            semconv.CLIENT: type(client).__qualname__,
            semconv.URL: self.url,
        }
        self.outside = context.snapshot()
        # A span is opened unless the request is made in a framework's call, which has one; it is counted on either.
        chat = context.model_call()
        if chat is not None and scope.untrained and not chat.untrained:
            chat = None  # an untrained call in the middle of the agent's own call
        if chat is not None:
            chat.span.set_attributes({**wire, semconv.WIRE_CALLS: chat.wire_calls + 1})
            # A framework's span may not name the model.
            if model and semconv.REQUEST_MODEL not in chat.span.attributes:
                chat.span.set_attribute(semconv.REQUEST_MODEL, str(model))
                chat.span.update_name(f"{semconv.CHAT} {model}")
        elif self.observer is not None:
            chat = self.opened = self.observer.started(path, str(model or ""), wire)
        if chat is not None:
            self.scope = chat
            chat.wire_calls += 1
            chat.requested = time.monotonic()
            if isinstance(self.body, dict) and (tools := self.body.get("tools")):
                if scope.rollout.capture_content:
                    offered_tools.remember(scope.rollout, chat.agent, tools)
                else:
                    offered_tools.remember_names(scope.rollout, tools)

    @property
    def body(self) -> Any:
        return getattr(self.options, _ARGUMENTS[self.sdk][2])

    def _settings(self) -> dict[str, Any]:
        body, more = self.body, getattr(self.options, "extra_json", None)  # what `extra_body=` of the SDKs becomes
        if not isinstance(body, dict):
            return {}
        return settings({**body, **more} if isinstance(more, Mapping) else body, self.path)

    def _record_messages(self) -> None:
        """Record the messages of a request that is not routed, if the rollout records them."""
        rollout = self.scope.rollout
        body = self.body
        if rollout.prompts and rollout.capture_content and self.scope.kind == semconv.CHAT and isinstance(body, dict):
            for name, value in request_messages(google.common(body)).items():
                self.scope.span.set_attribute(name, value)

    def client_to_send(self, *, is_async: bool) -> Any:
        """The client to send with: ours, with rewritten options, for a selected agent; otherwise the user's."""
        rollout = self.scope.rollout
        if rollout.system_prompts is not None and not self.scope.untrained:
            self._replace_system_prompts(rollout.system_prompts.get(self.scope.agent))
        if rollout.gateway_url is None:
            self._record_messages()
            return self.client
        if self.scope.untrained:
            context.refuse_gateway(self.scope, self.url)
            return self.client
        # A client made from the rollout's LLM resource has the gateway as its provider. Its call goes there under the
        # name of the calling agent, so that an agent that is not selected gets a response but is not trained.
        to_gateway = self.url.startswith(rollout.gateway_url)
        if rollout.selection.policy_for(self.scope.agent) is None and not to_gateway:
            self._record_messages()
            return self.client
        self.scope.span.set_attribute(semconv.ROUTED, True)
        self._rewrite(rollout.gateway_url)
        return _gateway_client(self.sdk, is_async=is_async)

    def _replace_system_prompts(self, texts: NamedTexts | None) -> None:
        if texts is None:
            return
        replaced = replace_system_prompts(self.body, texts)
        if replaced.names:
            setattr(self._copy_options(), _ARGUMENTS[self.sdk][2], replaced.body)
        span = self.scope.span
        # A framework's call of several requests is recorded as one.
        if self.scope.kind == semconv.CHAT and (replaced.names or not span.attributes.get(semconv.SYSTEM_PROMPTS)):
            span.set_attributes(replaced.facts(self.scope.rollout.capture_content))

    def _copy_options(self) -> Any:
        """Replace the request's options with a copy, and return the copy."""
        copied = getattr(self.options, "model_copy", None) or getattr(self.options, "copy", None)
        self.options = copied() if copied else copy.copy(self.options)
        name, place, _ = _ARGUMENTS[self.sdk]
        if name in self.kwargs:
            self.kwargs = {**self.kwargs, name: self.options}
        else:
            self.args = (*self.args[:place], self.options, *self.args[place + 1 :])
        return self.options

    def _rewrite(self, gateway_url: str) -> None:
        rollout = self.scope.rollout
        headers = self.options.headers if hasattr(self.options.headers, "items") else {}
        options = self._copy_options()
        agent = urllib.parse.quote(self.scope.agent, safe="")
        options.url = (
            f"{gateway_url}/rollouts/{rollout.rollout_id}/attempts/{rollout.attempt}/agents/{agent}/v1{self.path}"
        )
        stainless = {k: v for k, v in headers.items() if k.lower().startswith("x-stainless")}
        options.headers = {**stainless, "Authorization": f"Bearer {rollout.key}", _TRACEPARENT: self.scope.traceparent}
        options.headers["Content-Type"] = "application/json"
        arrivals.expect(self.scope)
        options.params = {}
        for limit in ("timeout", "max_retries"):
            if type(getattr(options, limit, None)).__name__ in ("NotGiven", "Omit"):
                setattr(options, limit, getattr(self.client, limit))

    def end(self, result: Any) -> Any:
        """End the span; that of a stream ends when it is read to its end."""
        if self.opened is not None and self.observer is not None:
            return self.observer.finished(self.opened, result)
        if self.scope.kind != semconv.CHAT:
            return result
        scope = self.scope
        if self.sdk == GENAI:
            return _described_google(result, scope)
        if hasattr(result, "http_response") and hasattr(result, "parse"):
            parse_through(result, lambda: contextlib.nullcontext(lambda parsed: _described(parsed, scope)))
        return _described(result, scope)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """The block that sends the request. An error of it ends the span.

        The span of a stream is open after the block, but what its reader calls meanwhile is not within it.
        """
        try:
            yield
        except BaseException as error:
            if self.opened is not None and self.observer is not None:
                self.observer.failed(self.opened, error)
            raise
        finally:
            if self.opened is not None:
                context.restore(self.outside)


def _described(result: Any, chat: Scope) -> Any:
    """The result of a request, which the framework's span gets the usage of; of a stream, also the response's id."""
    chunks = getattr(result, "_iterator", None)
    if chunks is None:
        if usage := getattr(result, "__dict__", {}).get("usage"):
            chat.span.set_attributes(usage_facts(usage))
    elif not isinstance(chunks, _Chunks):
        result._iterator = _Chunks(chunks, chat)
    return result


def _described_google(result: Any, chat: Scope) -> Any:
    """Google's response to a request, whose usage the framework's span gets."""
    if isinstance(result.response_stream, list):
        with contextlib.suppress(ValueError, TypeError, LookupError):
            chat.span.set_attributes(usage_facts(json.loads(result.response_stream[0])["usageMetadata"]))
    else:
        segments = result.segments
        async_segments = result.async_segments
        result.segments = lambda: _Chunks(segments(), chat)
        result.async_segments = lambda: _Chunks(async_segments(), chat)
    return result


def set_first_chunk(chat: Scope) -> None:
    """Set how long the stream's first chunk took, when it has come."""
    if chat.requested:
        chat.span.set_attribute(semconv.TIME_TO_FIRST_CHUNK, time.monotonic() - chat.requested)


Parsing = Callable[[], AbstractContextManager[Callable[[Any], Any]]]
"""Surrounds the call of a raw response's `parse()`; the value gets its result, and returns the caller's."""


def parse_through(raw: Any, parsing: Parsing) -> None:
    """Have a raw response's `parse()` run in `parsing()`."""
    raw._agl_parsing = parsing
    # A subclass, not a function on the object, which would keep the object alive or lose it too early.
    raw.__class__ = _parsing_class(type(raw))


@functools.cache
def _parsing_class(cls: Any) -> Any:
    def parse_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._agl_parsing() as parsed:
            return parsed(cls.parse(self, *args, **kwargs))

    async def parse_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._agl_parsing() as parsed:
            return parsed(await cls.parse(self, *args, **kwargs))

    parse = functools.wraps(cls.parse)(parse_async if inspect.iscoroutinefunction(cls.parse) else parse_sync)
    return type(cls.__name__, (cls,), {"parse": parse, "__module__": cls.__module__, "__doc__": cls.__doc__})


class _Chunks:
    """A stream's chunks, unchanged. They have the response's id and its usage, which most frameworks drop on the way to
    their own hooks."""

    def __init__(self, chunks: Any, scope: Scope) -> None:
        self.chunks = chunks
        self.scope = scope
        self.begun = False
        self.usage: dict[str, Any] = {}

    def take(self, chunk: Any) -> Any:
        known = usage_fields(chunk)
        # A chunk of Chat Completions has them; of Responses and Messages, what that is about.
        for name in ("response", "message"):
            if name in known:
                known = getattr(known[name], "__dict__", known)
        if not self.begun:
            self.begun = True
            set_first_chunk(self.scope)
            if id := known.get("id") or known.get("responseId"):
                self.scope.span.set_attribute(semconv.RESPONSE_ID, str(id))
        if usage := reported_usage(known):
            self.usage |= {name: value for name, value in usage_fields(usage).items() if value is not None}
            self.scope.span.set_attributes(usage_facts(self.usage))
        return chunk

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.take(next(self.chunks))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return self.take(await anext(self.chunks))


def _generation_path(sdk: str, options: Any) -> str | None:
    """`/chat/completions` and the like, whatever base the request's URL has; None for other requests."""
    if str(options.method).upper() != "POST":
        return None
    path = str(options.url).partition("?")[0].rstrip("/")
    if sdk == GENAI:
        model = "/v1beta/models/" + str(options.url).rpartition("/")[2]
        return model if path.endswith(GENERATION_PATHS["google"]) else None
    return next((known for known in GENERATION_PATHS[sdk] if path.endswith(known)), None)


def _gateway_client(sdk: str, *, is_async: bool) -> Any:
    """Our client for the gateway: one per SDK, and per event loop where it is async."""
    with _lock:
        if not is_async:
            if sdk not in _sync_clients:
                _sync_clients[sdk] = _new_client(sdk, is_async=False)
            return _sync_clients[sdk]
        key = sdk, asyncio.get_running_loop()
        if key not in _async_clients:
            for closed in [k for k in _async_clients if k[1].is_closed()]:
                del _async_clients[closed]
            _async_clients[key] = _new_client(sdk, is_async=True)
        return _async_clients[key]


def _new_client(sdk: str, *, is_async: bool) -> Any:
    module = importlib.import_module(sdk)
    cls = operator.attrgetter(_SDKS[sdk][is_async][0])(module)
    if sdk == GENAI:
        library = getattr(module._api_client, "httpx2", None) or module._api_client.httpx
    else:
        # Not the SDK's subclass of the client: anthropic's has the environment's proxies, whatever `trust_env` is.
        library = sys.modules[module.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]]

    class GatewayHttp(library.AsyncClient if is_async else library.Client):
        def send(self, request: Any, **options: Any) -> Any:
            request.headers["traceparent"] = request.headers[_TRACEPARENT]
            for name in list(request.headers):
                if name.lower() not in _ALLOWED_HEADERS and not name.lower().startswith("x-stainless-"):
                    del request.headers[name]
            arrival, stream = arrivals.Arrival(request.headers[_TRACEPARENT]), bool(options.get("stream"))
            sent: Any = super().send(request, **options)
            return (arrival.of_async if is_async else arrival.of)(sent, library, stream=stream)

    client = GatewayHttp(trust_env=False, limits=library.Limits(max_connections=1000, max_keepalive_connections=100))
    if sdk == GENAI:
        # Without a client of ours it would use aiohttp, which heeds the environment's proxies.
        options = {"base_url": "http://agl.invalid", f"httpx_{'async_' * is_async}client": client}
        return cls(vertexai=False, api_key="agl", http_options=options)
    return cls(api_key="agl", base_url="http://agl.invalid/v1", timeout=None, http_client=client)
