"""0.3's emitters and the readers of what they emit; the module is its `@reward` decorator too, as its module `reward`
is.

Within a rollout, what is emitted becomes a span with 0.3's name and attributes, which agl reads as its own; elsewhere
it is returned and not recorded, so that an instrumented agent runs unchanged in production.
"""

from __future__ import annotations

import base64
import functools
import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl import rewards, semconv
from agl._alias import make_callable
from agl.errors import RewardError
from agl.mdp.types import Reward
from agl.rewards.emit import record
from agl_agentlightning import types as T
from agl_agentlightning.attributes import (
    check_attributes_sanity,
    filter_and_unflatten_attributes,
    flatten_attributes,
    format_exception_attributes,
    full_qualified_name,
    sanitize_attributes,
)
from agl_agentlightning.semconv import (
    AGL_ANNOTATION,
    AGL_EXCEPTION,
    AGL_MESSAGE,
    AGL_OBJECT,
    AGL_OPERATION,
    LightningSpanAttributes,
    RewardPydanticModel,
)
from agl_agentlightning.tracer import DummyTracer, get_active_tracer

__all__ = [
    "OperationContext",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "encode_object",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "operation",
]

_REWARD, _MESSAGE_BODY, _OBJECT_TYPE, _OBJECT_LITERAL, _OBJECT_JSON, _NAME, _INPUT, _OUTPUT = (
    getattr(LightningSpanAttributes, name).value
    for name in (
        "REWARD",
        "MESSAGE_BODY",
        "OBJECT_TYPE",
        "OBJECT_LITERAL",
        "OBJECT_JSON",
        "OPERATION_NAME",
        "OPERATION_INPUT",
        "OPERATION_OUTPUT",
    )
)


class RewardTypeError(RewardError, TypeError):
    """A reward that is no number; 0.3 raised a TypeError."""


class RewardValueError(RewardError, ValueError):
    """A dict of rewards that cannot be read; 0.3 raised a ValueError."""


# -- emitting ---------------------------------------------------------------------------------------------------------
def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> T.SpanCoreFields:
    """Emit a reward; the last one of a rollout is its reward, as in 0.3.

    Args:
        reward: a number, or {name: number}.
        primary_key: the entry of the dict that counts; required for a dict.
        attributes: of the span: tags, or links (`utils.otel.make_link_attributes`); one to `gen_ai.response.id` credits
            the reward to that call.
        propagate: False returns the span and records nothing.

    Raises:
        RewardError: not a number (a TypeError), or a dict without `primary_key` or with values that are no numbers (a
            ValueError).
    """
    if isinstance(reward, Mapping):
        if wrong := [k for k, v in reward.items() if not isinstance(v, int | float)]:
            raise RewardValueError(f"the reward {wrong[0]!r} is {reward[wrong[0]]!r}", hint="give numbers")
        if primary_key is None:
            raise RewardValueError("a dict of rewards needs primary_key=", hint="name the entry to train on")
        if primary_key not in reward:
            raise RewardValueError(f"primary_key={primary_key!r} is none of {', '.join(reward)}")
        values = {primary_key: reward[primary_key], **reward}
    elif isinstance(reward, int | float):
        values = {"primary": reward}
    else:
        raise RewardTypeError(f"the reward is {reward!r}, a {type(reward).__name__}", hint="give a finite number")
    rewards.as_rewards(dict(values), primary=next(iter(values)))  # refuses NaN and infinities
    dimensions: list[dict[str, Any]] = [{"name": name, "value": float(value)} for name, value in values.items()]
    emitted = emit_annotation({_REWARD: dimensions, **(attributes or {})}, propagate=propagate)
    for dimension in dimensions[1:] if propagate else ():
        record(Reward(dimension["name"], dimension["value"], "emit", primary=False))
    return emitted


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> T.SpanCoreFields:
    """Emit a span with these attributes, nested values flattened; ValueError for one that OpenTelemetry has no type
    for."""
    attributes = flatten_attributes(dict(annotation))
    check_attributes_sanity(attributes)
    return _emit(AGL_ANNOTATION, sanitize_attributes(attributes), None, propagate)


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> T.SpanCoreFields:
    """Emit a text; TypeError for anything else."""
    if not isinstance(message, str):
        raise TypeError(f"a message is a string, not {message!r}; emit_object takes other values")
    return _emit(AGL_MESSAGE, {_MESSAGE_BODY: message}, attributes, propagate)


def emit_object(object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> T.SpanCoreFields:
    """Emit bytes or a JSON value; RuntimeError for anything else."""
    return _emit(AGL_OBJECT, encode_object(object), attributes, propagate)


def encode_object(object: Any) -> dict[str, Any]:
    """The attributes of a span that holds this value."""
    if isinstance(object, str | bool | int | float):
        return {_OBJECT_TYPE: type(object).__name__, _OBJECT_LITERAL: str(object)}
    if isinstance(object, bytes):
        return {_OBJECT_TYPE: "bytes", _OBJECT_LITERAL: base64.b64encode(object).decode()}
    try:
        return {_OBJECT_TYPE: full_qualified_name(type(object)), _OBJECT_JSON: json.dumps(object)}
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"Object must be JSON serializable, got: {type(object)}.") from error


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> T.SpanCoreFields:
    """Emit an exception that the agent handled; TypeError for anything else."""
    if not isinstance(exception, BaseException):
        raise TypeError(f"{exception!r} is not an exception")
    return _emit(AGL_EXCEPTION, format_exception_attributes(exception), attributes, propagate)


def _emit(
    name: str, facts: Mapping[str, Any], attributes: Mapping[str, Any] | None, propagate: bool
) -> T.SpanCoreFields:
    tracer = (get_active_tracer() if propagate else None) or DummyTracer()
    own = sanitize_attributes(flatten_attributes(dict(attributes or {})))
    return tracer.create_span(name, attributes={**facts, **own}, status=T.TraceStatus(status_code="OK"))


def operation(
    fn: Callable[..., Any] | None = None, *, propagate: bool = True, name: str | None = None, **attributes: Any
) -> Any:
    """A span around a function (`@operation`, `@operation(name="x")`) or a block (`with operation(name="x") as op:`).

    Args:
        name: of the operation; a function's own name if None.
        propagate: False records nothing.
        **attributes: of the span.

    Raises:
        ValueError: a name that is not given as `name=`, or twice.
    """
    if name is not None:
        if _NAME in attributes:
            raise ValueError(f"Cannot specify both name= and {_NAME}")
        attributes[_NAME] = name
    context = OperationContext(AGL_OPERATION, attributes, propagate)
    if fn is None:
        return context
    if not callable(fn):
        raise ValueError(f"operation({fn!r}): give the name as name={fn!r}")
    return context(fn)


class OperationContext:
    """What `operation` gives: a block, or a decorator that records arguments and result."""

    def __init__(self, name: str, attributes: Mapping[str, Any], propagate: bool = True) -> None:
        self.name = name
        self.propagate = propagate
        self.initial_attributes = flatten_attributes(dict(attributes))
        self._block: Any = None
        self._recorder: Any = None
        self._span: T.SpanCoreFields | None = None

    def _open(self, attributes: Mapping[str, Any]) -> Any:
        tracer = (get_active_tracer() if self.propagate else None) or DummyTracer()
        return tracer.operation_context(self.name, sanitize_attributes(attributes))

    def __enter__(self) -> OperationContext:
        self._block = self._open(self.initial_attributes)
        self._recorder = self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._block.__exit__(*error)
        finally:
            self._span = self._recorder.get_recorded_span()
            self._recorder = None

    def span(self) -> T.SpanCoreFields:
        """The span; RuntimeError while the block runs."""
        if self._span is None:
            raise RuntimeError("the span is there when the block has ended")
        return self._span

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record the operation's arguments, within the block."""
        _record(self._recorder, _INPUT, {**({"args": list(args)} if args else {}), **kwargs})

    def set_output(self, output: Any) -> None:
        """Record the operation's result, within the block."""
        _record(self._recorder, _OUTPUT, output)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(fn)
        attributes = {_NAME: fn.__name__, **self.initial_attributes}

        def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return {k: list(v) if isinstance(v, tuple) else v for k, v in bound.arguments.items()}

        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with self._open(attributes) as recorder:
                    _record(recorder, _INPUT, arguments(args, kwargs))
                    result = await fn(*args, **kwargs)
                    _record(recorder, _OUTPUT, result)
                    return result

            return run_async

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._open(attributes) as recorder:
                _record(recorder, _INPUT, arguments(args, kwargs))
                result = fn(*args, **kwargs)
                _record(recorder, _OUTPUT, result)
                return result

        return run


def _record(recorder: Any, prefix: str, value: Any) -> None:
    if recorder is None:
        raise RuntimeError("an operation's input and output can be set within its block alone")
    try:
        nested = flatten_attributes({prefix: value}, expand_leaf_lists=True)
    except ValueError:  # a dict with keys that are no strings
        nested = {prefix: value}
    recorder.record_attributes(sanitize_attributes(nested))


def reward(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function's result is emitted as a reward too; None is not, nor, with a warning, what is no
    number."""

    def emit(value: Any) -> Any:
        if isinstance(value, int | float):
            emit_reward(value)
        elif value is not None:
            warnings.warn(f"Reward is ignored because it is not a number: {value!r}", stacklevel=3)
        return value

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            return emit(await fn(*args, **kwargs))

        return run_async

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return emit(fn(*args, **kwargs))

    return run


# -- reading ----------------------------------------------------------------------------------------------------------
_AGENTOPS_OUTPUTS = ("agentops.task.output", "agentops.entity.output")


def get_rewards_from_span(span: T.SpanLike) -> list[RewardPydanticModel]:
    """The rewards of a span, the primary one first; [] if it holds none."""
    attributes = span.attributes or {}
    found = filter_and_unflatten_attributes({k: v for k, v in attributes.items() if k != _REWARD}, _REWARD)
    if found:
        return [RewardPydanticModel(str(r.get("name", "primary")), float(r["value"])) for r in found]
    own = Reward.of_span(attributes, None)
    return [RewardPydanticModel(own.name, own.value)] if own is not None and own.primary else []


def get_reward_value(span: T.SpanLike) -> float | None:
    """The primary reward of a span of agl, of 0.2, of 0.3, or of AgentOps; None if it holds none."""
    if found := get_rewards_from_span(span):
        return found[0].value
    attributes = span.attributes or {}
    for key in _AGENTOPS_OUTPUTS:
        output = attributes.get(key)
        if isinstance(output, str):
            try:
                output = json.loads(output)
            except json.JSONDecodeError:
                continue
        if isinstance(output, Mapping) and output.get("type") == "reward":
            return None if output.get("value") is None else float(output["value"])
    value = attributes.get("reward") if getattr(span, "name", None) == AGL_ANNOTATION else None
    return None if value is None else float(value)


def is_reward_span(span: T.SpanLike) -> bool:
    """Whether a span holds a primary reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[T.SpanLike]) -> list[T.SpanLike]:
    """The spans that hold a primary reward."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[T.SpanLike]) -> float | None:
    """The last primary reward; None if there is none."""
    return next((value for span in reversed(spans) if (value := get_reward_value(span)) is not None), None)


def get_message_value(span: T.SpanLike) -> str | None:
    """The text of an emitted message, None if there is none; TypeError for one that is no text."""
    text = _value(span, _MESSAGE_BODY, semconv.MESSAGE)
    if text is not None and not isinstance(text, str):
        raise TypeError(f"the message is {text!r}, not a string")
    return text


_LITERALS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text.lower() == "true",
    "bytes": lambda text: base64.b64decode(text.encode()),
}


def get_object_value(span: T.SpanLike) -> Any:
    """The value of an emitted object, None if there is none; RuntimeError for one that cannot be read."""
    attributes = span.attributes or {}
    if _OBJECT_LITERAL in attributes:
        kind = str(attributes.get(_OBJECT_TYPE, "str"))
        if kind not in _LITERALS:
            raise RuntimeError(f"cannot read an object of type {kind!r} from {_OBJECT_LITERAL}")
        return _LITERALS[kind](str(attributes[_OBJECT_LITERAL]))
    text = _value(span, _OBJECT_JSON, semconv.OBJECT)
    if text is None:
        return None
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"the span's object is not JSON: {text!r}") from error


def _value(span: T.SpanLike, key: str, kind: str) -> Any:
    """0.3's attribute, or agl's value of a span of that kind."""
    attributes = span.attributes or {}
    return attributes.get(
        key, attributes.get(semconv.VALUE) if attributes.get(semconv.OPERATION_NAME) == kind else None
    )


make_callable(__name__, reward)
