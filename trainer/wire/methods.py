"""The methods of a Protocol as HTTP requests: their arguments and results as pydantic models and as JSON.

Server, client and OpenAPI schema all read the table that `methods_of` makes. A numpy array in a dataclass is sent as
base64 of its little-endian bytes, everything else as JSON.
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

from agl.errors import AglError
from agl.trainer.http.errors import error_json
from agl.trainer.http.json_pieces import parse_in_pieces
from agl.trainer.http.limits import parse_json

_MOST_ERRORS = 100
"""Of arguments that do not fit, of which the first is named: pydantic writes each of them out."""
_ID_CHARACTERS = 2_000
"""Of an argument that is an id. A store keeps fewer (`codec.KEY_BYTES`), and its error says more."""


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a Protocol.

    Attributes:
        name: its name.
        summary: its docstring.
        arguments: model of its arguments.
        result: adapter of its result.
        error: makes the error of arguments that do not fit.
    """

    name: str
    summary: str
    arguments: type[BaseModel]
    result: TypeAdapter[Any]
    error: Callable[[str], AglError]

    def read(self, arguments: Any) -> dict[str, Any]:
        """Arguments of a request, validated and as the method takes them.

        Raises:
            AglError: made by `error`: they do not fit the method; it names the first one at fault.
        """
        try:
            model = self.arguments.model_validate(_few_fields(arguments, self.arguments.model_fields))
        except ValueError as error:
            if not isinstance(error, ValidationError):
                raise self.error(f"{self.name}: {error}") from None
            if error.error_count() > _MOST_ERRORS:
                raise self.error(f"{self.name}: {error.error_count()} values do not fit") from None
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            at = ".".join(str(part) for part in first["loc"])
            raise self.error(f"{self.name}: {at or 'the arguments'}: {first['msg']}") from None
        values = {name: getattr(model, name) for name in type(model).model_fields}
        for name, value in values.items():
            # Servers remember ids; how many there are is bounded where they do.
            if name.endswith("_id") and isinstance(value, str) and len(value) > _ID_CHARACTERS:
                found = f"{len(value)} characters, the limit is {_ID_CHARACTERS}"
                raise self.error(f"{self.name}: {name} has {found}")
        return values


def _few_fields(value: Any, known: Collection[str]) -> Any:
    """A value that is no object with far more fields than it can have, each of which pydantic would write out.

    Raises:
        ValueError: it is one.
    """
    if isinstance(value, Mapping) and len(value) > len(known) + _MOST_ERRORS:
        raise ValueError(f"{len(value)} fields, of which there are {len(known)}")
    return value


def _bounded(kind: Any) -> Any:
    """The type whose values have few fields (`_few_fields`) where it is a model, and as it is otherwise."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return kind
    return Annotated[kind, BeforeValidator(lambda value: _few_fields(value, kind.model_fields))]


def methods_of(
    protocol: type,
    *,
    error: Callable[[str], AglError],
    arguments: Mapping[Any, Any] | None = None,
    results: Mapping[Any, Any] | None = None,
) -> dict[str, Method]:
    """The async methods that a Protocol and its bases declare, `close` excepted.

    Args:
        error: makes what `Method.read` raises.
        arguments, results: type hint -> pydantic type, for what is not sent
            as its fields say.
    """
    of_arguments = _Types(arguments or {})
    of_results = _Types(results or {})
    functions = {name: f for cls in reversed(protocol.__mro__) for name, f in vars(cls).items()}
    methods = {}
    for name, function in functions.items():
        if not inspect.iscoroutinefunction(function) or name == "close":
            continue
        hints = typing.get_type_hints(function)
        fields: dict[str, Any] = {}
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (of_arguments.of(hints[parameter.name], parameter.name), default)
        title = "".join(part.title() for part in name.split("_"))
        model = create_model(f"{title}Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        result = TypeAdapter(of_results.of(hints["return"]))
        methods[name] = Method(name, inspect.cleandoc(function.__doc__ or ""), model, result, error)
    return methods


# -- types --------------------------------------------------------------------------------------------------------
def _packed(dtype: np.dtype[Any]) -> Any:
    """The type of a numpy array [n] that is sent as base64 of its bytes."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError("not base64 text")
        try:
            data = base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from None
        if len(data) % dtype.itemsize:
            raise ValueError(f"not a whole number of {dtype.itemsize}-byte values")
        return np.frombuffer(data, dtype=dtype)

    schema = {"type": "string", "contentEncoding": "base64", "description": f"numpy {dtype.str}"}
    return Annotated[Any, BeforeValidator(read), WithJsonSchema(schema)]


@functools.cache
def _arrays(cls: type) -> Mapping[str, np.dtype[Any]]:
    """The fields of a dataclass that are numpy arrays, with their little-endian dtypes."""
    if not dataclasses.is_dataclass(cls):
        return {}
    hints = {name: _unfolded(hint) for name, hint in typing.get_type_hints(cls).items()}
    arrays = {f.name: hints[f.name] for f in dataclasses.fields(cls) if typing.get_origin(hints[f.name]) is np.ndarray}
    return {
        name: np.dtype(typing.get_args(typing.get_args(hint)[1])[0]).newbyteorder("<") for name, hint in arrays.items()
    }


def _unfolded(hint: Any) -> Any:
    """What a type alias with arguments stands for: numpy's `NDArray` is one (PEP 695) since 2.5."""
    value = getattr(typing.get_origin(hint), "__value__", None)
    return hint if value is None else value[typing.get_args(hint)]


_Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that fits a database column."""


def _readable(text: str) -> str:
    if "\0" in text:
        raise ValueError("text with a zero character")
    text.encode()
    return text


Id = Annotated[str, AfterValidator(_readable)]
"""Text that a database can store; JSON has more."""


class _Types:
    """The pydantic types of type hints. `special`: those of hints that are not sent as they are."""

    def __init__(self, special: Mapping[Any, Any]) -> None:
        self._special, self._models = special, dict[type, Any]()

    def of(self, hint: Any, name: str = "") -> Any:
        """The type of the argument or field with that name."""
        if isinstance(hint, type) and hint in self._special:
            return _bounded(self._special[hint])
        if hint is int:
            return _Int
        if hint is str:
            return Id if name.removesuffix("s").endswith("id") else str
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self._model(hint)
        arguments = typing.get_args(hint)
        origin = typing.get_origin(hint)
        if not arguments or origin is typing.Literal:
            return hint
        if origin is Sequence:
            # Each of a hundred thousand values may be wrong in ten ways.
            return Annotated[tuple[self.of(arguments[0], name), ...], Field(fail_fast=True)]  # type: ignore[misc]
        if origin is Mapping:
            return hint
        validated = tuple(a if a is Ellipsis else self.of(a, name) for a in arguments)
        if origin in (typing.Union, types.UnionType):
            return typing.Union[validated]  # noqa: UP007
        several = origin[validated]  # type: ignore[index]
        return Annotated[several, Field(fail_fast=True)] if origin in (list, tuple, set, frozenset) else several

    def _model(self, cls: type) -> Any:
        """A type that validates a dataclass as a pydantic model and yields the dataclass."""
        if cls in self._models:
            return self._models[cls]
        hints = typing.get_type_hints(cls)
        arrays = _arrays(cls)
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            default: Any = ...
            if field.default is not dataclasses.MISSING:
                default = field.default
            elif field.default_factory is not dataclasses.MISSING:
                default = Field(default_factory=field.default_factory)
            packed = arrays.get(field.name)
            fields[field.name] = (_packed(packed) if packed else self.of(hints[field.name], field.name), default)
        model = create_model(cls.__name__, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
        names = list(fields)
        self._models[cls] = Annotated[
            _bounded(model), AfterValidator(lambda m: cls(**{name: getattr(m, name) for name in names}))
        ]
        return self._models[cls]


# -- JSON ---------------------------------------------------------------------------------------------------------
def dumps(value: Any) -> bytes:
    """JSON text of arguments, results, and what contains them.

    Raises:
        TypeError: it contains a value that is not JSON.
    """
    try:
        return orjson.dumps(value, default=_portable, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # orjson refuses lone surrogates and integers above 64 bits, which are JSON too.
        return json.dumps(value, default=_portable).encode()


def portable(value: Any) -> Any:
    """An argument or a result as `dumps` takes it: a sequence of any kind as a list, arrays in dataclasses packed."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        return [_with_packed_arrays(item, arrays) if (arrays := _arrays(type(item))) else item for item in value]
    return value


def _with_packed_arrays(value: Any, arrays: Mapping[str, np.dtype[Any]]) -> dict[str, Any]:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    for name, dtype in arrays.items():
        fields[name] = base64.b64encode(np.ascontiguousarray(fields[name], dtype=dtype).tobytes()).decode()
    return fields


def _portable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, AglError):
        return error_json(value)["error"]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def loads(body: bytes, depth: int, *, nan: bool = False) -> Any:
    """The value of JSON text.

    Args:
        nan: whether NaN and Infinity are values, as Python writes them.

    Raises:
        ValueError: it is not JSON, or nested deeper than `depth`.
    """
    try:
        return parse_json(body, depth)
    except orjson.JSONDecodeError:
        if b"\\ud" not in body.lower() and not (nan and (b"NaN" in body or b"Infinity" in body)):
            raise
    return parse_in_pieces(body, depth, _of_python)


def _of_python(text: bytes) -> Any:
    """What Python's parser makes of JSON text: it takes halves of characters, which orjson does not."""
    try:
        # Of bytes it would guess the encoding: in UTF-16, what `check_json` takes for quotes would be none.
        return json.loads(text.decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise ValueError("nested too deep") from None
