"""0.3's emitters and reward readers; the module is its `@reward` decorator too, as its module `reward` is."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl import rewards, semconv, tracing
from agl._alias import make_callable
from agl.errors import RewardError
from agl.trainer.compat.missing import refuse

__all__ = [
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "is_reward_span",
    "operation",
]


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> None:
    """`agl.emit_reward`. 0.3's attributes linked a reward to a call by hand; agl links it to the call itself."""
    if not propagate:
        raise refuse("emit_reward(propagate=False)", "call it where the reward is to be recorded")
    if attributes:
        raise refuse("emit_reward(attributes=)", "emit the reward inside the tool or agent that earned it")
    if isinstance(reward, Mapping) and primary_key is None:
        raise RewardError("a dict of rewards needs primary_key=", hint="name the entry to train on")
    rewards.emit_reward(reward, primary_key)


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    """`agl.emit_message`."""
    _emit(semconv.MESSAGE, {semconv.VALUE: str(message), **(attributes or {})}, propagate)


def emit_object(object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    """`agl.emit_object`."""
    _emit(semconv.OBJECT, {semconv.VALUE: json.dumps(object), **(attributes or {})}, propagate)


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """`agl.emit_exception`."""
    scope = tracing.start(semconv.EXCEPTION, type(exception).__name__, attributes=attributes) if propagate else None
    if scope is not None:
        tracing.end(scope, error=exception)


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> None:
    """A span with these attributes; nested values become JSON."""
    plain = (str, bool, int, float)
    _emit("annotation", {k: v if isinstance(v, plain) else json.dumps(v) for k, v in annotation.items()}, propagate)


def _emit(kind: str, attributes: Mapping[str, Any], propagate: bool) -> None:
    scope = tracing.start(kind, "", attributes=attributes) if propagate else None
    if scope is not None:
        tracing.end(scope)


def operation(function: Callable[..., Any] | None = None, *, propagate: bool = True, **attributes: Any) -> Any:
    """`agl.operation`, as a decorator `@operation` or `@operation(name="x")`, or `with operation(name="x"):`."""
    if function is not None:
        return rewards.operation(function)
    return _Operation(str(attributes.get("name", "operation")))


class _Operation:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return rewards.operation(function)

    def __enter__(self) -> _Operation:
        self._block = rewards.operation(self.name)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record the operation's arguments."""
        self._set("agl.operation.input", {**{str(i): a for i, a in enumerate(args)}, **kwargs})

    def set_output(self, output: Any) -> None:
        """Record the operation's result."""
        self._set("agl.operation.output", output)

    def _set(self, key: str, value: Any) -> None:
        scope = tracing.current()
        if scope is not None:
            scope.span.set_attribute(key, json.dumps(value, default=str))


def reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function's result is emitted as a reward too."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            value = await function(*args, **kwargs)
            rewards.emit_reward(value)
            return value

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        rewards.emit_reward(value)
        return value

    return run


def get_reward_value(span: Any) -> float | None:
    """The primary reward of a span, agl's or 0.3's; None if it holds none."""
    attributes = span.attributes or {}
    if attributes.get(semconv.OPERATION_NAME) == semconv.REWARD:
        return float(attributes[semconv.REWARD_VALUE]) if attributes.get(semconv.REWARD_PRIMARY, True) else None
    value = attributes.get("agentlightning.reward.0.value")
    return None if value is None else float(value)


def is_reward_span(span: Any) -> bool:
    """Whether a span holds a primary reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[Any]) -> list[Any]:
    """The spans that hold a primary reward."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Any]) -> float | None:
    """The last primary reward; None if there is none."""
    values = [value for span in spans if (value := get_reward_value(span)) is not None]
    return values[-1] if values else None


def get_message_value(span: Any) -> str | None:
    """The text of an emitted message."""
    return _value(span, semconv.MESSAGE)


def get_object_value(span: Any) -> Any:
    """The JSON value of an emitted object."""
    text = _value(span, semconv.OBJECT)
    return None if text is None else json.loads(text)


def _value(span: Any, kind: str) -> str | None:
    attributes = span.attributes or {}
    return attributes.get(semconv.VALUE) if attributes.get(semconv.OPERATION_NAME) == kind else None


make_callable(__name__, reward)
