"""The wire hook: inside a rollout, a selected agent's SDK request goes to the gateway; every other one is untouched.

The openai and anthropic SDKs have one choke point, the client's `request` method, which also sees raw-response posts,
bound methods cached before the hook, and clients made earlier. A selected request is sent by a client of our own, which
knows the gateway and nothing of the user's keys, headers, proxies or cookies.

Patched, because the SDKs offer no hook: `OpenAI.request`, `AsyncOpenAI.request` (openai >= 1.66, < 4),
`Anthropic.request`, `AsyncAnthropic.request` (anthropic >= 0.50, < 3).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import threading
import urllib.parse
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from agl import semconv, tracing
from agl.tracing import Scope

GENERATION_PATHS = ("/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens")
"""A POST to one of these asks a model for something; other requests (files, embeddings) are none of our business."""

_SDKS = {"openai": ("OpenAI", "AsyncOpenAI"), "anthropic": ("Anthropic", "AsyncAnthropic")}


class Observer(Protocol):
    """Makes a span of a request that no framework span encloses."""

    def started(self, client: Any, path: str, options: Any) -> Scope | None: ...

    def finished(self, scope: Scope, result: Any) -> Any: ...

    def failed(self, scope: Scope, error: BaseException) -> None: ...


_lock = threading.Lock()
_installs = 0
_originals: list[tuple[type, Callable[..., Any]]] = []
_observers: dict[str, Observer] = {}
_sync_clients: dict[str, Any] = {}
_async_clients: dict[str, weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any]] = {}


def install() -> None:
    """Hook every installed SDK. Calls nest; `uninstall` as often as `install`."""
    global _installs
    with _lock:
        _installs += 1
        if _installs > 1:
            return
        for sdk, classes in _SDKS.items():
            if importlib.util.find_spec(sdk) is None:
                continue
            module = importlib.import_module(sdk)
            for name in classes:
                _patch(sdk, getattr(module, name))


def uninstall() -> None:
    """Restore what the outermost `install` changed."""
    global _installs
    with _lock:
        if _installs == 0:
            return
        _installs -= 1
        if _installs:
            return
        for cls, original in _originals:
            if original is None:
                del cls.request  # type: ignore[attr-defined]
            else:
                cls.request = original  # type: ignore[attr-defined]
        _originals.clear()
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


def _patch(sdk: str, cls: type) -> None:
    inherited = cls.request  # type: ignore[attr-defined]
    _originals.append((cls, cls.__dict__.get("request")))  # type: ignore[arg-type]
    if inspect.iscoroutinefunction(inherited):

        @functools.wraps(inherited)
        async def request_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            scope = tracing._current.get()
            if scope is None or (scope := tracing.current()) is None:
                return await inherited(self, *args, **kwargs)
            call = _Request(sdk, self, args, kwargs, scope)
            if call.path is None:
                return await inherited(self, *args, **kwargs)
            call.start()
            try:
                client = call.gateway_client(is_async=True)
                return call.end(await inherited(client, *call.args, **call.kwargs))
            except BaseException as error:
                call.fail(error)
                raise

        cls.request = request_async  # type: ignore[attr-defined]
        return

    @functools.wraps(inherited)
    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = tracing._current.get()
        if scope is None or (scope := tracing.current()) is None:
            return inherited(self, *args, **kwargs)
        call = _Request(sdk, self, args, kwargs, scope)
        if call.path is None:
            return inherited(self, *args, **kwargs)
        call.start()
        try:
            client = call.gateway_client(is_async=False)
            return call.end(inherited(client, *call.args, **call.kwargs))
        except BaseException as error:
            call.fail(error)
            raise

    cls.request = request  # type: ignore[attr-defined]


class _Request:
    """One SDK request inside a rollout: where it goes, and the span that it belongs to."""

    def __init__(self, sdk: str, client: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope) -> None:
        self.sdk, self.client, self.args, self.kwargs, self.scope = sdk, client, args, kwargs, scope
        self.options = kwargs["options"] if "options" in kwargs else args[1]
        self.path = _generation_path(self.options)
        self.own: Scope | None = None
        self.observer = _observers.get(sdk)

    def start(self) -> None:
        """Open a span unless a framework's `chat` span is open already, and note the wire call on it."""
        chat = tracing.enclosing(semconv.CHAT)
        if chat is None and self.observer is not None and self.path is not None:
            chat = self.own = self.observer.started(self.client, self.path, self.options)
        if chat is not None:
            self.scope = chat
            chat.wire_calls += 1
            chat.span.set_attribute(semconv.WIRE_CALLS, chat.wire_calls)
            chat.span.set_attribute(semconv.CLIENT, type(self.client).__qualname__)
            chat.span.set_attribute(semconv.URL, str(getattr(self.client, "base_url", "")))

    def gateway_client(self, *, is_async: bool) -> Any:
        """The client to send with: ours, with rewritten options, for a selected agent; otherwise the user's own."""
        rollout = self.scope.rollout
        if rollout.gateway_url is None or rollout.selection.policy_for(self.scope.agent) is None:
            return self.client
        self.scope.span.set_attribute(semconv.ROUTED, True)
        self._rewrite(rollout.gateway_url)
        return _client(self.sdk, is_async=is_async)

    def _rewrite(self, gateway_url: str) -> None:
        rollout = self.scope.rollout
        options = self.options.model_copy() if hasattr(self.options, "model_copy") else self.options.copy()
        agent = urllib.parse.quote(self.scope.agent, safe="")
        options.url = (
            f"{gateway_url}/rollouts/{rollout.rollout_id}/attempts/{rollout.attempt}/agents/{agent}/v1{self.path}"
        )
        given = self.options.headers
        keep = (
            {k: v for k, v in given.items() if k.lower().startswith("x-stainless")} if hasattr(given, "items") else {}
        )
        options.headers = {**keep, "Authorization": f"Bearer {rollout.key}", "traceparent": self.scope.traceparent}
        options.params = {}
        if type(options.timeout).__name__ in ("NotGiven", "Omit"):
            options.timeout = self.client.timeout
        if "options" in self.kwargs:
            self.kwargs = {**self.kwargs, "options": options}
        else:
            self.args = (self.args[0], options, *self.args[2:])

    def end(self, result: Any) -> Any:
        """Close the span; a stream closes it when it is read to its end."""
        if self.own is not None and self.observer is not None:
            return self.observer.finished(self.own, result)
        return result

    def fail(self, error: BaseException) -> None:
        if self.own is not None and self.observer is not None:
            self.observer.failed(self.own, error)


def _generation_path(options: Any) -> str | None:
    """`/chat/completions` and the like, whatever base the request's URL has; None for other requests."""
    if str(options.method).upper() != "POST":
        return None
    path = str(options.url).partition("?")[0].rstrip("/")
    # The longest one first: `/completions` also ends `/chat/completions`.
    for known in sorted(GENERATION_PATHS, key=len, reverse=True):
        if path.endswith(known):
            return known
    return None


def _client(sdk: str, *, is_async: bool) -> Any:
    """Our own client for the gateway. It reads no proxy settings and no credentials from the environment."""
    if not is_async:
        with _lock:
            if sdk not in _sync_clients:
                _sync_clients[sdk] = _new_client(sdk, is_async=False)
            return _sync_clients[sdk]
    loop = asyncio.get_running_loop()
    with _lock:
        clients = _async_clients.setdefault(sdk, weakref.WeakKeyDictionary())
        if loop not in clients:
            clients[loop] = _new_client(sdk, is_async=True)
        return clients[loop]


def _new_client(sdk: str, *, is_async: bool) -> Any:
    module = importlib.import_module(sdk)
    cls = getattr(module, _SDKS[sdk][1 if is_async else 0])
    http = getattr(module, "DefaultAsyncHttpxClient" if is_async else "DefaultHttpxClient")
    return cls(api_key="agl", base_url="http://agl.invalid/v1", timeout=None, http_client=http(trust_env=False))
