"""0.3's `utils.otel`: nested values as flat OpenTelemetry attributes and back, tags, and links between spans."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry.semconv.attributes import exception_attributes

from agl import tracing
from agl_agentlightning.semconv import LightningSpanAttributes, LinkAttributes, LinkPydanticModel

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

__all__ = [
    "check_attributes_sanity",
    "extract_links_from_attributes",
    "extract_tags_from_attributes",
    "filter_and_unflatten_attributes",
    "filter_attributes",
    "flatten_attributes",
    "format_exception_attributes",
    "full_qualified_name",
    "get_tracer",
    "get_tracer_provider",
    "make_link_attributes",
    "make_tag_attributes",
    "query_linked_spans",
    "sanitize_attribute_value",
    "sanitize_attributes",
    "sanitize_list_attribute_sanity",
    "unflatten_attributes",
]

logger = logging.getLogger("agl.compat")

S = TypeVar("S")
_PLAIN = (str, bool, int, float)
_LINK = LightningSpanAttributes.LINK.value
_TAG = LightningSpanAttributes.TAG.value


# -- nested and flat --------------------------------------------------------------------------------------------------
def flatten_attributes(nested_data: Any, *, expand_leaf_lists: bool = False) -> dict[str, Any]:
    """{"a": {"b": [1, 2]}} -> {"a.b": [1, 2]}; the items of a list get their indices as keys ("a.b.0").

    Args:
        nested_data: dicts and lists of any depth.
        expand_leaf_lists: whether a list of plain values of one type is split up, too.

    Raises:
        ValueError: a key that is no string.
    """
    flat: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            items = list(value.items())
            for key, _ in items:
                if not isinstance(key, str):
                    raise ValueError(
                        f"Only string keys are supported in dictionaries, got '{key}' of type {type(key)} in {path}"
                    )
        elif isinstance(value, list) and not (path and _is_leaf(path, value, expand_leaf_lists)):
            items = [(str(i), item) for i, item in enumerate(value)]
        else:
            flat[path] = value
            return
        for key, item in items:
            add(f"{path}.{key}" if path else key, item)

    add("", nested_data)
    return flat


def _is_leaf(path: str, values: list[Any], expand: bool) -> bool:
    if expand or not values or not all(isinstance(v, _PLAIN) for v in values):
        return False
    types = {type(v) for v in values}
    if len(types) > 1:
        names = ", ".join(sorted(t.__name__ for t in types))
        logger.warning("the list %r has mixed primitive types (%s): each item becomes an attribute", path, names)
    return len(types) == 1


def unflatten_attributes(flat_data: Mapping[str, Any]) -> Any:
    """The inverse of `flatten_attributes`: a dict whose keys are 0..n-1 becomes a list.

    Where a path is both a value and a prefix of other paths, the value is dropped.
    """
    root: dict[str, Any] = {}
    for path, value in flat_data.items():
        *parents, last = path.split(".")
        node = root
        for key in parents:
            if not isinstance(node.get(key), dict):
                node[key] = {}
            node = node[key]
        node[last] = value
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(value) for key, value in node.items()}
    numbers = [str(i) for i in range(len(items))]
    return [items[n] for n in numbers] if items and set(numbers) == set(items) else items


def filter_attributes(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those named `prefix` or `prefix.<anything>`."""
    return {k: v for k, v in attributes.items() if k == prefix or k.startswith(f"{prefix}.")}


def filter_and_unflatten_attributes(attributes: Mapping[str, Any], prefix: str) -> Any:
    """The nested value whose attributes begin with `prefix.`; ValueError if `prefix` itself is an attribute."""
    if prefix in attributes:
        raise ValueError(f"{prefix!r} is an attribute itself, not the prefix of others")
    found = filter_attributes(attributes, prefix)
    return unflatten_attributes({k[len(prefix) + 1 :]: v for k, v in found.items()})


# -- values that OpenTelemetry takes ----------------------------------------------------------------------------------
def sanitize_list_attribute_sanity(maybe_list: Sequence[Any]) -> list[Any]:
    """The list with all its items of one type, numbers widened; ValueError if that cannot be."""
    for kinds, result in (((str,), str), ((bool,), bool), ((int,), int), ((int, float), float)):
        if all(isinstance(item, kinds) for item in maybe_list):
            return [result(item) for item in maybe_list]
    types = {type(item) for item in maybe_list}
    raise ValueError(f"List must contain only one type of primitive values, got: {types}.")


def sanitize_attribute_value(object: Any, force: bool = True) -> Any:
    """The value if OpenTelemetry takes it, else its JSON.

    Args:
        force: write what is no JSON with `str`; otherwise it is a ValueError.
    """
    if isinstance(object, _PLAIN):
        return object
    if isinstance(object, list):
        try:
            return sanitize_list_attribute_sanity(object)
        except ValueError as error:
            logger.warning("Failed to sanitize list attribute, it is written as JSON: %s", error)
    try:
        return json.dumps(object, default=str if force else None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Object must be JSON serializable, got: {type(object)}.") from error


def sanitize_attributes(attributes: Mapping[str, Any], force: bool = True) -> dict[str, Any]:
    """`sanitize_attribute_value` of each; the ValueError names the attribute."""
    result = {}
    for key, value in attributes.items():
        try:
            result[key] = sanitize_attribute_value(value, force)
        except ValueError as error:
            raise ValueError(f"Failed to sanitize attribute '{key}': {error}") from error
    return result


def check_attributes_sanity(attributes: Mapping[Any, Any]) -> None:
    """ValueError unless every key is a string and every value one that OpenTelemetry takes."""
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"Attribute key must be a string, got {type(key)} for key '{key}'")
        if isinstance(value, list):
            try:
                sanitize_list_attribute_sanity(value)
            except ValueError as error:
                raise ValueError(f"Failed to sanitize list attribute '{key}': {error}") from error
        elif not isinstance(value, _PLAIN):
            raise ValueError(
                f"Attribute value must be a string, int, float, bool, or list of these, got {type(value)} "
                f"for '{key}': {value!r}"
            )


def format_exception_attributes(exception: BaseException) -> dict[str, Any]:
    """OpenTelemetry's attributes of an exception."""
    return {
        exception_attributes.EXCEPTION_TYPE: type(exception).__name__,
        exception_attributes.EXCEPTION_MESSAGE: str(exception),
        exception_attributes.EXCEPTION_ESCAPED: True,
        exception_attributes.EXCEPTION_STACKTRACE: "".join(traceback.format_exception(exception)),
    }


def full_qualified_name(obj: type) -> str:
    """The class with its module, without "builtins"."""
    return obj.__qualname__ if obj.__module__ == "builtins" else f"{obj.__module__}.{obj.__qualname__}"


# -- tags and links ---------------------------------------------------------------------------------------------------
def make_tag_attributes(tags: Sequence[str]) -> dict[str, Any]:
    """Tags as attributes of a span."""
    return flatten_attributes({_TAG: list(tags)}, expand_leaf_lists=True)


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """The tags of a span; pydantic's ValidationError for a tag that is no string."""
    from pydantic import TypeAdapter

    return TypeAdapter(list[str]).validate_python(filter_and_unflatten_attributes(attributes, _TAG) or [])


def make_link_attributes(links: Mapping[str, str]) -> dict[str, Any]:
    """Links to the spans with these attributes; ValueError for a value that is no string.

    A reward with a link to `gen_ai.response.id` is credited to the call of that response.
    """
    for key, value in links.items():
        if not isinstance(value, str):
            raise ValueError(f"Link value must be a string, got {type(value)} for key '{key}'")
    key_match = LinkAttributes.KEY_MATCH.value
    value_match = LinkAttributes.VALUE_MATCH.value
    return flatten_attributes({_LINK: [{key_match: k, value_match: v} for k, v in links.items()]})


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[LinkPydanticModel]:
    """The links of a span; pydantic's ValidationError for one without key or value."""
    from pydantic import TypeAdapter

    links = filter_and_unflatten_attributes(attributes, _LINK) or []
    return TypeAdapter(list[LinkPydanticModel]).validate_python(links)


def query_linked_spans(spans: Sequence[S], links: Sequence[LinkPydanticModel]) -> list[S]:
    """The spans that every link leads to."""
    return [span for span in spans if all(_value(span, link.key_match) == link.value_match for link in links)]


def _value(span: Any, key: str) -> Any:
    if key not in ("trace_id", "span_id"):
        return (span.attributes or {}).get(key)
    if hasattr(span, key):
        return getattr(span, key)
    # An SDK span: ids are numbers, 16 and 8 bytes.
    number = getattr(span.context, key, None)
    return None if number is None else f"{number:0{32 if key == 'trace_id' else 16}x}"


# -- OpenTelemetry itself ---------------------------------------------------------------------------------------------
def get_tracer_provider(inspect: bool = True) -> TracerProvider:
    """agl's tracer provider; within a rollout, spans made with it are recorded with the rollout's own. `inspect`, which
    logged the provider's processors in 0.3, has no effect."""
    from agl_agentlightning.span_processor import LightningSpanProcessor

    provider = tracing.provider()
    LightningSpanProcessor.add_to(provider)
    return provider


def get_tracer(use_active_span_processor: bool = True) -> Tracer:
    """A tracer of `get_tracer_provider`, or of a provider that records nothing."""
    from opentelemetry.sdk.trace import TracerProvider

    provider = get_tracer_provider() if use_active_span_processor else TracerProvider(shutdown_on_exit=False)
    return provider.get_tracer("agentlightning")
