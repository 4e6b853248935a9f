"""Model calls over gRPC: of Google's clients (Vertex AI, Gemini), xAI's, and of text generation servers.

They cannot be routed, because the gateway answers HTTP alone. Each is a `chat` span, from the request to the end of the
answer, so that none is missing without a word: a trace shows it, and training says that it bypassed the gateway.

Patched while rollouts run, where imported (grpcio): what a channel returns for a method, sync and async, beneath all
interceptors of the sync ones.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from agl import semconv
from agl.tracing import context
from agl.tracing.client_patches import ClientPatches
from agl.tracing.context import Scope
from agl.tracing.import_hooks import when_imported

_METHODS = re.compile(
    r"\b(?:GenerativeService|PredictionService|LlmBidiService)/(?:Stream|Bidi)?GenerateContent$"  # Gemini, Vertex AI
    r"|\bPredictionService/(?:Stream)?RawPredict$"  # other makers' models on Vertex AI
    r"|\bxai_api\.Chat/(?:GetCompletion|GetCompletionChunk|StartDeferredCompletion)$"
    r"|\bTextGenerationService/(?:Generate|GenerateStream|Completion|CompletionAsync)$"  # TGI, Yandex
    r"|\bfmaas\.GenerationService/(?:Generate|GenerateStream)$"  # vLLM's adapter
)
"""The methods that ask a model, as gRPC writes them: `/package.Service/Method`."""
_MODEL_FIELDS = ("model", "model_id", "endpoint", "model_uri")
"""The fields of requests that name the model."""

_CALLABLES = {
    "grpc._channel": (
        ("_UnaryUnaryMultiCallable", ("__call__", "with_call"), ("future",)),
        ("_UnaryStreamMultiCallable", (), ("__call__",)),
        ("_SingleThreadedUnaryStreamMultiCallable", (), ("__call__",)),
        ("_StreamStreamMultiCallable", (), ("__call__",)),
    ),
    "grpc.aio._channel": (
        ("UnaryUnaryMultiCallable", (), ("__call__",)),
        ("UnaryStreamMultiCallable", (), ("__call__",)),
        ("StreamStreamMultiCallable", (), ("__call__",)),
    ),
}
"""Module -> class, the methods that return the answer, and those that return a call which ends later."""

_patches = ClientPatches()
_forget: list[Callable[[], None]] = []


def install() -> None:
    """Patch the classes that are or will be imported."""
    _forget.append(when_imported(tuple(_CALLABLES), _patch))


def uninstall() -> None:
    """Restore them."""
    while _forget:
        _forget.pop()()
    _patches.restore()


def _patch(module: str) -> None:
    for class_name, blocking, deferred in _CALLABLES[module]:
        cls = getattr(sys.modules[module], class_name, None)
        if cls is None or _patches.has(cls, "__call__"):
            continue
        for methods, around in ((blocking, _blocking), (deferred, _deferred)):
            for name in methods:
                _patches.replace(cls, name, around(getattr(cls, name)))


def _blocking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = None if context.idle() else _begin(self, args, kwargs)
        if scope is None:
            return original(self, *args, **kwargs)
        with context.within(scope):
            return original(self, *args, **kwargs)

    return call


def _deferred(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = context.snapshot()
        scope = None if context.idle() else _begin(self, args, kwargs)
        if scope is None:
            return original(self, *args, **kwargs)
        # The call ends in its answer, not here: what follows does not lie within it.
        context.restore(before)
        try:
            pending = original(self, *args, **kwargs)
        except BaseException as error:
            context.end(scope, error=error)
            raise
        _when_done(pending, scope)
        return pending

    return call


def _begin(multi_callable: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scope | None:
    """The scope of a model call that nobody else has seen; None for all other calls."""
    method = getattr(multi_callable, "_method", b"")
    name = method.decode("utf-8", "replace") if isinstance(method, bytes) else str(method)
    if _METHODS.search(name) is None or context.current() is None or context.model_call() is not None:
        return None
    request = args[0] if args else kwargs.get("request")
    known = (getattr(request, field, None) for field in _MODEL_FIELDS)
    # Google's names are paths: "projects/p/locations/l/publishers/google/models/gemini".
    model = next((value for value in known if isinstance(value, str) and value), "").rpartition("/")[2]
    target = getattr(multi_callable, "_target", b"")
    address = target.decode("utf-8", "replace") if isinstance(target, bytes) else ""
    facts = {semconv.REQUEST_MODEL: model or None, semconv.CLIENT: "grpc", semconv.URL: f"grpc://{address}{name}"}
    return context.start(semconv.CHAT, model, attributes=facts)


def _when_done(pending: Any, scope: Scope) -> None:
    """End the scope when a call ends. Nothing here keeps the call alive: one that is dropped cancels itself."""
    if (interceptors := getattr(pending, "_interceptors_task", None)) is not None:
        # An async call with interceptors: what they return is the call itself.
        interceptors.add_done_callback(functools.partial(_intercepted, scope))
        return
    end = functools.partial(_end, scope, weakref.ref(pending))
    if hasattr(pending, "add_callback"):
        if not pending.add_callback(end):
            end()
    else:
        pending._cython_call.add_done_callback(end)


def _intercepted(scope: Scope, interceptors: Any) -> None:
    if interceptors.cancelled():
        context.end(scope)
    elif (error := interceptors.exception()) is not None:
        context.end(scope, error=error)
    elif hasattr(call := interceptors.result(), "_cython_call"):
        _when_done(call, scope)
    else:
        context.end(scope)  # an interceptor's own answer


def _end(scope: Scope, reference: Callable[[], Any]) -> None:
    call = reference()
    # A reader that stops early is no error.
    left = call is None or call.cancelled()
    context.end(scope, error=None if left else _error(call))


def _error(call: Any) -> BaseException | str | None:
    """How a call failed that has ended; None if it did not."""
    if isinstance(call, Exception):  # a sync call is its own error
        return None if call.code().name == "OK" else call  # type: ignore[attr-defined]
    code = _result(call.code())
    return None if code.name == "OK" else f"{code.name}: {_result(call.details())}"


def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("the call has not ended")
