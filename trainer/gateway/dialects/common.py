"""What dialects share: checked bodies, text parts, tool choice, log-probs, server-sent events.

Invariant: every field of a request has a type that spells out what the API documents, in nested objects too, so that
what the provider refuses is refused here: a body is a pydantic model, and the objects in it are `closed` TypedDicts.
A field that is null is a field that is not there. A body has few errors, however large it is, since pydantic writes
each of them out: lists are `Several`, objects of any fields have `pairs`, and the first unknown field is refused.
"""

from __future__ import annotations

import functools
import json
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic_core import PydanticKnownError
from typing_extensions import TypedDict, is_typeddict

from agl.errors import nearest
from agl.mdp.types import IntArray
from agl.trainer.engines.base import Completion
from agl.trainer.gateway.calls import Choice
from agl.trainer.gateway.errors import OutOfRangeError, RequestError
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.token_text import CONTEXT

Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item")

Several = Annotated[list[Item], Field(fail_fast=True)]
"""A list, whose first item that does not fit is refused."""

Fields = Mapping[str, Any]
"""Field -> the types that it may have."""

ToolChoice = tuple[list[dict[str, Any]] | None, str | Literal[True] | None]
"""The tools that the policy sees, and the one that it must call: a name, True for any, None for no force."""


NOTHING = (False, 0, "", [], {})
"""Values that ask for nothing, whatever the field."""


SMALLEST_NUCLEUS = 1e-6
"""In float32, a `top_p` that only the most likely token is in."""


class Unsupported(NamedTuple):
    """A documented field that asks for what a policy in training does not have.

    Attributes:
        why: follows the field's name in the error.
        neutral: the values that ask for nothing, in addition to null; they are taken.
    """

    why: str
    neutral: tuple[Any, ...] = NOTHING


MODERATION = Unsupported("needs the provider's moderation models, which are not here; leave it out")
OTHER_DISTRIBUTION = Unsupported(
    "would sample from something other than the policy in training, so it is not supported; leave it out"
)
SEARCHED = Unsupported("needs a tool search, which a policy in training does not have; send the tools that it may call")
CODE_CALLS = "is for the provider's code execution, which a policy in training does not have; leave it out"


CLOSED = ConfigDict(extra="forbid", strict=True)
"""How the objects of a request are read: by their documented fields alone, without conversions. The TypedDicts in a
model with this configuration have it as well."""

closed = with_config(CLOSED)
"""Marks a TypedDict whose objects are read by `checked`."""


_MOST_INTEGER = 2**63 - 1


def _as_integer(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value > _MOST_INTEGER:
        raise PydanticKnownError("less_than_equal", {"le": _MOST_INTEGER})
    if isinstance(value, int) and value < -_MOST_INTEGER - 1:
        raise PydanticKnownError("greater_than_equal", {"ge": -_MOST_INTEGER - 1})
    return value


Integer = Annotated[int, BeforeValidator(_as_integer)]
"""A number that JSON may write as 4.0, as Google's SDK does. It has 64 bits, as in the answers that repeat it."""

listed = with_config(ConfigDict(extra="ignore", strict=True))
"""Marks a TypedDict of an API's object with any further fields, such as a tool that a choice repeats."""


@closed
class PlainFormat(TypedDict):
    """OpenAI's format of an answer without a schema."""

    type: Literal["text", "json_object"]


FormatName = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]
"""What OpenAI takes as the name of a schema, and in Chat Completions as that of a function."""


@closed
class PromptCacheOptions(TypedDict, total=False):
    """OpenAI's `prompt_cache_options`."""

    mode: Literal["implicit", "explicit"] | None
    ttl: Literal["30m", "12h"] | None
    prewarm: bool | None
    comparison_response_id: str | None


def pairs(most: int) -> BeforeValidator:
    """Refuses an object of any fields that has more than `most` of them."""

    def few(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"it can have at most {most} pairs, not {len(value)}")
        return value

    return BeforeValidator(few)


class OpenAIBody(BaseModel):
    """The fields of OpenAI's APIs that are accepted and have no effect."""

    model_config = CLOSED

    user: str | None = None
    metadata: Annotated[dict[str, str], pairs(16)] | None = None
    client_metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    prompt_cache_key: str | None = None
    # Written with a hyphen by the SDKs of 2025.
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: Annotated[PromptCacheOptions, pairs(16)] | None = None
    safety_identifier: str | None = None


def service_tier(body: OpenAIBody) -> str:
    """The tier that OpenAI says has served a request: a request without one, or with "auto", gets the default."""
    return "default" if body.service_tier in (None, "auto") else body.service_tier


_MOST_ERRORS = 100
"""Of a body that does not fit, of which the first is named: pydantic writes each of them out."""


def validated(model: type[Body], data: Any, refused: Mapping[str, Unsupported] = MappingProxyType({})) -> Body:
    """`data` as a `model`.

    Args:
        data: the JSON of a request's body.
        refused: the documented fields that the model lacks.

    Raises:
        RequestError: 400: no JSON object, as for `known_fields`, or a value that does not fit.
    """
    if not isinstance(data, dict):
        raise RequestError(400, "the body is not a JSON object")
    present = _present(known_fields(data, model.model_fields, refused), model, "")
    try:
        return model.model_validate(present)
    except ValidationError as error:
        raise _misfit(error, model, present, "") from None


def checked(
    kind: Any, value: Any, where: str, refused: Mapping[str, Unsupported] = MappingProxyType({})
) -> dict[str, Any]:
    """The fields of an object, once they fit a type.

    Args:
        kind: a `closed` TypedDict, or a union of them with a `Discriminator`.
        value: the object.
        where: names it in errors.
        refused: the documented fields that the type lacks.

    Raises:
        RequestError: 400, naming the field that does not fit, or as for `require_neutral`.
    """
    if isinstance(value, dict):
        require_neutral(value, refused, f"{where}.")
        value = {name: inner for name, inner in value.items() if name not in refused}
    value = _present(value, kind, where)
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise _misfit(error, kind, value, where) from None


_adapter = functools.cache(TypeAdapter)


class _Shape(NamedTuple):
    """The objects and lists that a type describes.

    Attributes:
        names: the fields of its objects.
        inner: those of them that hold objects or lists of objects, with the shape of these.
        items: of its lists; None where it has none that hold objects.
        closed: whether its objects have no other fields.
    """

    names: frozenset[str]
    inner: Mapping[str, _Shape]
    items: _Shape | None
    closed: bool


_PLAIN = _Shape(frozenset(), {}, None, False)
"""Of what is no object of the API: a text, a number, or a value of the agent's own, such as a JSON schema."""


@functools.cache
def _shape(kind: Any) -> _Shape:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is Annotated:
        return _shape(arguments[0])
    if is_typeddict(kind):
        return _shape_of(typing.get_type_hints(kind), getattr(kind, "__pydantic_config__", CLOSED))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _shape_of({name: field.annotation for name, field in kind.model_fields.items()}, kind.model_config)
    if origin is list and (items := _shape(arguments[0])) is not _PLAIN:
        return _Shape(frozenset(), {}, items, False)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in map(_shape, arguments) if member is not _PLAIN]
        return functools.reduce(_either, members, _PLAIN)
    return _PLAIN


def _shape_of(fields: Mapping[str, Any], config: ConfigDict) -> _Shape:
    """The shape of an object with fields of these types."""
    shapes = {name: _shape(kind) for name, kind in fields.items()}
    inner = {name: shape for name, shape in shapes.items() if shape is not _PLAIN}
    return _Shape(frozenset(fields), inner, None, config.get("extra") == "forbid")


def _either(one: _Shape, other: _Shape) -> _Shape:
    """The shape of a value that has one of two."""
    if one is _PLAIN:
        return other
    shared = {name: _either(one.inner[name], other.inner[name]) for name in one.inner.keys() & other.inner.keys()}
    return _Shape(
        one.names | other.names,
        {**one.inner, **other.inner, **shared},
        one.items or other.items,
        one.closed and other.closed,
    )


def _present(value: Any, kind: Any, where: str) -> Any:
    """A value of a type without the fields that are null, as frameworks write what is not set, in its objects.

    Args:
        where: names the value in errors; "" for a whole body.

    Raises:
        RequestError: 400, an object has more fields than the type, of which the first unknown one is named.
    """
    return _within(value, _shape(kind), (where,) if where else ())


def _within(value: Any, shape: _Shape, path: tuple[str | int, ...]) -> Any:
    if isinstance(value, list) and shape.items is not None:
        return [_within(item, shape.items, (*path, i)) for i, item in enumerate(value)]
    if not isinstance(value, dict) or not shape.names:
        return value
    fields = value
    if None in value.values():
        fields = {name: inner for name, inner in value.items() if inner is not None}
    if shape.closed and len(fields) > len(shape.names):
        name = next(name for name in fields if name not in shape.names)
        raise _unknown(".".join(map(str, (*path, name))), name, shape.names)
    inner = {name: _within(fields[name], of, (*path, name)) for name, of in shape.inner.items() if name in fields}
    return {**fields, **inner} if inner else fields


def _misfit(error: ValidationError, kind: Any, value: Any, where: str) -> RequestError:
    """Why a value does not fit a type. `where`: its field; "" for a whole body."""
    if (count := error.error_count()) > _MOST_ERRORS:
        return RequestError(400, f"{count} values do not fit", code="invalid_value", param=where or None)
    # Of a union, the member that the value is meant for is the one that it fits for longest.
    first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    path = _path(first["loc"], value, first["type"]) or []
    field = ".".join(map(str, [where, *path] if where else path))
    context = first.get("ctx", {})
    match first["type"]:
        case "greater_than_equal":
            return OutOfRangeError(field, first["input"], context["ge"], above=False)
        case "less_than_equal":
            return OutOfRangeError(field, first["input"], context["le"], above=True)
        case "extra_forbidden":
            name = str(path[-1])
            # Of a union, another member may have it.
            return _unknown(field, name, _field_names(kind, path[:-1]) - {name})
        case "missing":
            return RequestError(400, f"{field} is missing", code="missing_required_parameter", param=field)
        case "union_tag_invalid" | "union_tag_not_found":
            field += f".{context['discriminator'].strip(chr(39))}"
            why = f"{field} is {context['tag']!r}" if "tag" in context else f"{field} is missing"
            known = f"; it is one of {context['expected_tags']}" if "expected_tags" in context else ""
            return RequestError(400, why + known, code="invalid_value", param=field)
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return RequestError(400, f"{field}: {first['msg']}", code=code, param=field)


def _unknown(field: str, name: str, known: Collection[str]) -> RequestError:
    """The refusal of a field that an object cannot have. `known`: those that it can."""
    return RequestError(400, f"unknown field {field!r}; {nearest(name, known)}", code="unknown_parameter", param=field)


def _path(steps: Sequence[str | int], value: Any, error: str) -> list[str | int] | None:
    """Where in a value an error is: its place without the names of a union's members, which pydantic puts among the
    fields, and which fields can have as well. None for a place that the value does not have.

    Args:
        steps: the place as pydantic has it.
        value: what was checked.
        error: the error's type.
    """
    if not steps:
        return []
    step, *rest = steps
    if not rest and error == "missing":
        return [step] if isinstance(value, dict) and step not in value else None
    if _has(value, step) and (inner := _path(rest, value[step], error)) is not None:
        return [step, *inner]
    if not rest and error == "extra_forbidden":
        return None
    return _path(rest, value, error)


def _has(value: Any, step: str | int) -> bool:
    """Whether an object has a field, or a list an index."""
    return isinstance(step, int) if isinstance(value, list) else isinstance(value, dict) and step in value


def _field_names(kind: Any, path: Sequence[str | int]) -> set[str]:
    """The fields that an object at a place in a type can have."""
    if is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        hints = typing.get_type_hints(kind)
        if not path:
            return {*hints}
        return _field_names(hints[str(path[0])], path[1:]) if path[0] in hints else set()
    # The members of a union, or what a list holds.
    inner = path[1:] if typing.get_origin(kind) is list else path
    return set().union(*(_field_names(member, inner) for member in typing.get_args(kind)))


def known_fields(
    data: Mapping[str, Any], known: Collection[str], refused: Mapping[str, Unsupported], where: str = ""
) -> dict[str, Any]:
    """The fields of an object that ask for something.

    Args:
        data: the object.
        known: the fields that the reader honours, or that have no effect on an answer.
        refused: the other documented ones.
        where: precedes their names in errors.

    Raises:
        RequestError: 400, an unknown field (with the nearest known one), or as for `require_neutral`.
    """
    require_neutral(data, refused, where)
    for name in data:
        if name not in known and name not in refused:
            raise _unknown(where + name, name, known)
    return {name: value for name, value in data.items() if name in known and value is not None}


def require_neutral(data: Mapping[str, Any], refused: Mapping[str, Unsupported], where: str = "") -> None:
    """Refuse what a policy in training cannot honour.

    Args:
        data: an object.
        refused: its fields.
        where: precedes their names in errors.

    Raises:
        RequestError: 400, one of these fields has a value that is not neutral.
    """
    for name, value in data.items():
        if value is None or name not in refused:
            continue
        if _without_nulls(value) not in refused[name].neutral:
            why = f"{where}{name} {refused[name].why}"
            raise RequestError(400, why, code="unsupported_parameter", param=where + name)


def _without_nulls(value: Any) -> Any:
    """A value without the fields that are null, at any depth."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}


def nucleus(top_p: float | None) -> float:
    """`top_p` as engines take it, in (0, 1]: null keeps every token, and 0 the most likely one alone."""
    return 1.0 if top_p is None else max(top_p, SMALLEST_NUCLEUS)


def json_schema(form: Any, where: str, types: Sequence[str] = ("text", "json_object", "json_schema")) -> str:
    """The JSON schema that an answer must fit, as JSON text; "" for free text.

    Args:
        form: the format as the API has it, None for none.
        where: names it in errors.
        types: those of the API.

    Raises:
        RequestError: 400, a type that the API does not have, or no schema where the type needs one.
    """
    if form is None:
        return ""
    kind = expect(form, dict, where, "is not an object").get("type")
    if kind not in types:
        why = f"{where}.type is {kind!r}; it is one of {', '.join(map(repr, types))}"
        raise RequestError(400, why, code="invalid_value", param=f"{where}.type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return '{"type": "object"}'
    # Chat Completions has it one level deeper than the others.
    inner = form.get("json_schema", form)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    return json.dumps(expect(schema, dict, where, "has no schema"))


def expect(value: Any, kind: Any, where: str, otherwise: str) -> Any:
    """`value`, if it is of a kind.

    Raises:
        RequestError: 400, `where` followed by `otherwise`.
    """
    if not isinstance(value, kind):
        raise RequestError(400, f"{where} {otherwise}", code="invalid_value", param=where)
    return value


def fields(value: Any, kinds: Fields, where: str) -> dict[str, Any]:
    """The named fields of an object; others are dropped.

    Args:
        value: the object.
        kinds: the fields, and the types that each may have.
        where: names the object in errors.

    Raises:
        RequestError: 400, no object, or a field of another type.
    """
    expect(value, dict, where, "is not an object")
    known = {name: value.get(name) for name in kinds}
    for name, field in known.items():
        if not isinstance(field, kinds[name]):
            why = "is missing" if field is None else f"has the wrong type, {type(field).__name__}"
            raise RequestError(400, f"{where}.{name} {why}", code="invalid_value", param=f"{where}.{name}")
    return known


def typed(value: Any, types: Mapping[str, Fields], where: str, only: str) -> dict[str, Any]:
    """An object that has a type, such as a part of a message: the type and its `fields`.

    Args:
        value: the object.
        types: those that are known, and their fields.
        where: names the object in errors.
        only: what can be trained, for errors.

    Raises:
        RequestError: 400, as for `fields`, or another type.
    """
    kind = expect(value, dict, where, "is not an object").get("type")
    if not isinstance(kind, str) or kind not in types:
        why = f"{where} has the type {kind!r}; only {only} can be trained"
        raise RequestError(400, why, code="unsupported_value", param=where)
    return {"type": kind, **fields(value, types[kind], where)}


def content(value: Any, types: Mapping[str, Fields], where: str, only: str = "text") -> str | list[dict[str, Any]]:
    """A text, or parts of these types; the arguments are those of `typed`.

    Raises:
        RequestError: 400, neither text nor parts, or as for `typed`.
    """
    if isinstance(value, str):
        return value
    parts = expect(value, list, where, "is neither text nor parts")
    return [typed(part, types, f"{where}.{i}", only) for i, part in enumerate(parts)] or ""


def check_tool_names(names: Mapping[str, str], pattern: str) -> None:
    """Refuse a tool whose name the provider refuses.

    Args:
        names: the place of each name in the body -> the name.
        pattern: the provider's.

    Raises:
        RequestError: 400, naming the field.
    """
    for where, name in names.items():
        if not re.fullmatch(pattern, name):
            why = f"{where} is {name[:200]!r}, which does not match the pattern '^{pattern}$'"
            raise RequestError(400, why, code="invalid_value", param=where)


def check_at_most(items: Sequence[Any], most: int, where: str) -> None:
    """Refuse a list of more items than the provider takes.

    Raises:
        RequestError: 400, naming the field, its length and the bound.
    """
    if len(items) > most:
        raise OutOfRangeError(where, items, most, above=True)


def contradiction(first: str, why: str) -> RequestError:
    """The refusal of a parameter that another one contradicts. `why`: follows its name in the message."""
    return RequestError(400, f"{first} {why}", code="invalid_parameter_combination", param=first)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of tools in the form of Chat Completions."""
    return [tool["function"]["name"] for tool in tools]


def tool_choice_object(tools: list[dict[str, Any]], choice: Mapping[str, Any], kind: Any) -> ToolChoice:
    """OpenAI's choice of one tool, or of the tools that may be called, of which the policy then sees no others.

    Args:
        tools: in the form of Chat Completions.
        choice: of the request.
        kind: the API's forms of a choice; Chat Completions has names one level deeper.

    Raises:
        RequestError: 400, an unknown kind of choice, none of these forms, or there is no such tool.
    """
    if choice.get("type") not in ("function", "allowed_tools", None):
        raise RequestError(
            400,
            f"tool_choice of type {choice['type']!r} is not supported; send only the tools that may be called",
            code="unsupported_value",
            param="tool_choice",
        )
    checked(kind, choice, "tool_choice")
    if choice["type"] == "function":
        name = _name_of(choice)
        _check_names(tools, [name])
        return tools, name
    inner = choice.get("allowed_tools", choice)
    names = [_name_of(tool) for tool in inner["tools"]]
    _check_names(tools, names)
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
    return tool_choice(allowed, inner["mode"], required=("required",))


def _name_of(choice: Mapping[str, Any]) -> str:
    return choice.get("function", choice)["name"]


def _check_names(tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for name in names:
        if name not in tool_names(tools):
            raise RequestError(400, f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")


def only_functions(kind: Any, where: str) -> None:
    """Refuse a tool of another type than a function.

    Raises:
        RequestError: 400, naming the tool and its type.
    """
    if kind != "function":
        raise RequestError(
            400,
            f"{where} is of type {kind!r}; a policy can be trained with function tools only, which run in the agent",
            code="unsupported_value",
            param=where,
        )


def tool_choice(tools: list[dict[str, Any]], choice: str | None, required: Sequence[str]) -> ToolChoice:
    """OpenAI's choice of tools by a word.

    Args:
        tools: in the form of Chat Completions.
        choice: of the request.
        required: the words for "call any tool".

    Raises:
        RequestError: 400, an unknown word, or a required tool where there is none.
    """
    if choice == "none":
        return None, None
    if choice in required:
        if not tools:
            raise RequestError(400, "tool_choice requires a tool, but there are none", param="tool_choice")
        return tools, any_tool(tools)
    if choice not in (None, "auto"):
        raise RequestError(400, f"tool_choice {choice!r} is unknown", code="invalid_value", param="tool_choice")
    return tools or None, None


def any_tool(tools: Sequence[Mapping[str, Any]]) -> str | Literal[True]:
    """What forces a call of any of the tools: the name of the only one, or True."""
    names = tool_names(tools)
    return names[0] if len(names) == 1 else True


def logprob_entries(
    completion: Completion | Choice, rendering: Rendering, places: Iterable[int] | None = None
) -> list[dict[str, Any]]:
    """OpenAI's entries for the log-probs of the sampled tokens, or of those at these places."""
    if isinstance(completion, Completion):
        ids = completion.token_ids
        logprobs = completion.logprobs.tolist()
        top = completion.top_logprobs
    else:
        ids = np.asarray(completion.ids, np.int32)
        logprobs = completion.logprobs
        top = completion.top

    def entry(before: IntArray, token: int, logprob: float) -> dict[str, Any]:
        text = rendering.decode_after(before, [token])
        spelled = text.encode()
        if not text or "\ufffd" in text:
            # A token that is part of a character decodes to a replacement, or adds nothing to one.
            spelled = rendering.token_bytes(token) or (None if text else b"")
        return {"token": text, "logprob": float(logprob), "bytes": None if spelled is None else list(spelled)}

    entries = []
    for k in range(ids.size) if places is None else places:
        before, likeliest = ids[max(0, k - CONTEXT) : k], top[k] if k < len(top) else ()
        others = [entry(before, token, logprob) for token, logprob in likeliest]
        entries.append({**entry(before, int(ids[k]), logprobs[k]), "top_logprobs": others})
    return entries


def sse(data: Any, event: str | None = None) -> bytes:
    """A server-sent event with JSON in it."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + orjson.dumps(data) + b"\n\n"
