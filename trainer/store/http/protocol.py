"""The store's methods as HTTP requests: their arguments and results as pydantic models and as JSON.

The table `METHODS` is made from the signatures of `Store`; server, client and the OpenAPI schema all read it. Token ids
are base64 of little-endian int32, log-probs of little-endian float32, everything else is JSON.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from agl import errors
from agl.errors import AglError, StoreError
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.trainer.http.limits import parse_json
from agl.trainer.store.base import NewRollout, Store, TrainingRun
from agl.trainer.store.sql import codec

PREFIX = "/v1/store"
BATCH_PATH = f"{PREFIX}/batch"
MOST_OPERATIONS = 256
"""Maximum number of operations in one batch."""
WAITING = {"dequeue_rollout": "wait", "wait_for_rollouts": "timeout"}
"""Methods that wait, and the argument with the seconds that they wait."""
RUNNER_METHODS = frozenset(
    {
        "dequeue_rollout",
        "give_back",
        "update_attempt",
        "heartbeat",
        "get_rollout",
        "get_resources",
        "add_calls",
        "add_spans",
    }
)
"""Methods that a runner may call; what it writes must belong to attempts that are open."""


def _packed(dtype: str) -> Any:
    """The type of a numpy array [n] that is sent as base64 of its bytes."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError("not base64 text")
        try:
            data = base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from None
        if len(data) % 4:
            raise ValueError("not a whole number of 4-byte values")
        return np.frombuffer(data, dtype=dtype)

    return Annotated[
        Any,
        BeforeValidator(read),
        WithJsonSchema({"type": "string", "contentEncoding": "base64", "description": f"numpy {dtype}"}),
    ]


_Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that fits a database column."""


def _readable(text: str) -> str:
    if "\0" in text:
        raise ValueError("text with a zero character")
    text.encode()
    return text


_Id = Annotated[str, AfterValidator(_readable)]
"""Text that a database can store; JSON has more."""
_ARRAYS = {"prompt_ids": "<i4", "response_ids": "<i4", "logprobs": "<f4"}
"""The arrays of `Call` and their dtypes."""


@functools.cache
def _model(cls: type) -> Any:
    """A type that validates a dataclass as a pydantic model and yields the dataclass."""
    hints = typing.get_type_hints(cls)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        packed = _ARRAYS.get(field.name) if cls is Call else None
        default: Any = ...
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = Field(default_factory=field.default_factory)
        fields[field.name] = (_packed(packed) if packed else _type_of(hints[field.name], field.name), default)
    model = create_model(cls.__name__, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
    names = list(fields)
    return Annotated[model, AfterValidator(lambda m: cls(**{name: getattr(m, name) for name in names}))]


def _type_of(hint: Any, name: str = "") -> Any:
    """The pydantic type for the type hint of the argument or field with that name."""
    if hint is int:
        return _Int
    if hint is str:
        return _Id if name.removesuffix("s").endswith("id") else str
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _model(hint)
    arguments, origin = typing.get_args(hint), typing.get_origin(hint)
    if not arguments or origin is typing.Literal:
        return hint
    if origin is Sequence:
        return tuple[_type_of(arguments[0], name), ...]  # type: ignore[misc]
    if origin is Mapping:
        return hint
    validated = tuple(a if a is Ellipsis else _type_of(a, name) for a in arguments)
    return typing.Union[validated] if origin in (typing.Union, types.UnionType) else origin[validated]  # type: ignore[index]  # noqa: UP007


@dataclass(frozen=True, slots=True)
class Method:
    """One method of `Store`.

    Attributes:
        name: its name. summary: its docstring. arguments: model of its arguments. result: adapter of its result.
    """

    name: str
    summary: str
    arguments: type[BaseModel]
    result: TypeAdapter[Any]

    def read(self, arguments: Any) -> dict[str, Any]:
        """Arguments of a request, validated and as the method takes them.

        Raises:
            StoreError: they do not fit the method; it names the first one at fault.
        """
        try:
            model = self.arguments.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            at = ".".join(str(part) for part in first["loc"])
            raise StoreError(
                f"{self.name}: {at or 'the arguments'}: {first['msg']}", hint="see /openapi.json"
            ) from None
        return {name: getattr(model, name) for name in type(model).model_fields}


def _methods() -> dict[str, Method]:
    methods = {}
    for name, function in vars(Store).items():
        if not inspect.iscoroutinefunction(function) or name == "close":
            continue
        hints = typing.get_type_hints(function)
        fields: dict[str, Any] = {}
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (_type_of(hints[parameter.name], parameter.name), default)
        title = "".join(part.title() for part in name.split("_"))
        model = create_model(f"{title}Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        summary = inspect.cleandoc(function.__doc__ or "")
        methods[name] = Method(name, summary, model, TypeAdapter(_type_of(hints["return"])))
    return methods


METHODS: Mapping[str, Method] = _methods()


# -- JSON ---------------------------------------------------------------------------------------------------------
def dumps(value: Any) -> bytes:
    """JSON text of arguments, results, and what contains them.

    Raises:
        TypeError: it contains a value that is not JSON.
    """
    try:
        return orjson.dumps(value, default=_portable, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # As in `codec.dumps`: lone surrogates and longer integers are JSON too.
        return json.dumps(value, default=_portable).encode()


def portable(value: Any) -> Any:
    """An argument or a result as `dumps` takes it: a sequence of any kind as a list, calls with their arrays packed."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        return [_call(item) if isinstance(item, Call) else item for item in value]
    return value


def _call(call: Call) -> dict[str, Any]:
    fields = {f.name: getattr(call, f.name) for f in dataclasses.fields(Call)}
    for name, dtype in _ARRAYS.items():
        fields[name] = base64.b64encode(np.ascontiguousarray(fields[name], dtype=dtype).tobytes()).decode()
    return fields


def _portable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def loads(body: bytes, depth: int) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: it is not JSON, or nested deeper than `depth`.
    """
    try:
        return parse_json(body, depth)
    except orjson.JSONDecodeError:
        if b"\\ud" not in body.lower():
            raise
    try:
        value = json.loads(body)
    except RecursionError:
        raise ValueError(f"nested more than {depth} deep") from None
    level, remaining = [value], depth
    while level := [inner for outer in level for inner in _children(outer)]:
        if (remaining := remaining - 1) < 0:
            raise ValueError(f"nested more than {depth} deep")
    return value


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Find the argument that is no JSON value.

    Raises:
        StoreError: as the store itself raises it, with the name of the value and its place.
    """
    for value in arguments.values():
        for item in value if isinstance(value, list | tuple) else ():
            match item:
                case NewRollout():
                    codec.rollout_row(item, item.rollout_id or "", 0.0)
                case Call():
                    codec.call_row(item)
                case Span():
                    codec.span_row(item)
        if isinstance(value, TrainingRun):
            codec.run_row(value, 0.0)
        if isinstance(value, Mapping):
            codec.dumps(dict(value), "the resources")


# -- errors -------------------------------------------------------------------------------------------------------
def to_error(answer: Any) -> AglError:
    """The error in the body of an answer."""
    facts = answer.get("error") if isinstance(answer, Mapping) else None
    if not isinstance(facts, Mapping):
        return StoreError("the store's answer was not understood", hint="is this the URL of an agl store?")
    cls = getattr(errors, str(facts.get("type")), None)
    if not (isinstance(cls, type) and issubclass(cls, AglError)):
        cls = StoreError
    where = facts.get("where")
    return cls(str(facts.get("message")), hint=facts.get("hint"), **(where if isinstance(where, dict) else {}))
