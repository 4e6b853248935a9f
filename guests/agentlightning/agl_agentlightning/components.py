"""Builds what 0.3's `Trainer` takes as an instance, a class, a factory, a name or a dict."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agl.errors import ConfigError

__all__ = ["build_component", "instantiate_component", "instantiate_from_spec", "load_class"]

V = TypeVar("V")
_SPEC_ERROR = "Invalid {spec_name} spec: {actual_type}. Expected {expected_type}, str, dict, or None."
_TYPE_ERROR = "{spec_name} factory returned {type_name}, which is not a {expected_type} subclass."


class SpecTypeError(ConfigError, TypeError):
    """A component, or its specification, of another type."""


class SpecValueError(ConfigError, ValueError):
    """A specification that names no component."""


def load_class(path: str) -> Any:
    """The class at "module.Class"; 0.3's modules are those here.

    Raises:
        SpecValueError: there is none.
    """
    module, _, name = path.replace("agentlightning", "agl_agentlightning", 1).rpartition(".")
    try:
        return getattr(importlib.import_module(module or "agl_agentlightning"), name)
    except (ImportError, AttributeError) as error:
        hint = "write it as module.Class, or give an instance"
        raise SpecValueError(f"{path!r} names no class", hint=hint) from error


def instantiate_component(
    cls: Callable[..., V],
    provided_kwargs: Mapping[str, Any] | None = None,
    optional_defaults: Mapping[str, Any] | None = None,
) -> V:
    """An object of the class, with the defaults that its constructor takes by name; callable ones are called."""
    options = dict(provided_kwargs or {})
    parameters = inspect.signature(cls).parameters if optional_defaults else {}
    for name, default in (optional_defaults or {}).items():
        if name in parameters and name not in options:
            options[name] = default() if callable(default) else default
    return cls(**options)


def instantiate_from_spec(
    spec: str | Mapping[str, Any],
    *,
    spec_name: str,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., Any] | None = None,
    registry: Mapping[str, str] | None = None,
) -> Any:
    """An object from "module.Class" or {"type": "module.Class", argument: value, ...}.

    Args:
        spec_name: of the component, for messages.
        optional_defaults: as of `instantiate_component`.
        dict_requires_type: whether a dict needs its "type"; else it may have a "name" of the registry, or be the
            arguments of `dict_default_cls`.
        registry: short names -> "module.Class".
    """
    options: dict[str, Any] = {}
    named: Any = spec
    if isinstance(spec, Mapping):
        options = dict(spec)
        named = options.pop("type", None)
        if named is None and dict_requires_type:
            raise SpecValueError(f"{spec_name} dict must have a 'type' key with the class full name")
        if named is None and registry and options.get("name") in registry:
            named = options.pop("name")
    elif not isinstance(spec, str):
        raise SpecTypeError(f"{spec_name} spec must be a string or dict, not {type(spec).__name__}")
    cls = load_class((registry or {}).get(named, named)) if isinstance(named, str) else named or dict_default_cls
    if cls is None:
        raise SpecValueError(f"{spec_name} dict must have a 'type' key: it has no default class")
    return instantiate_component(cls, options, optional_defaults)


def build_component(
    spec: Any,
    *,
    expected_type: type[V],
    spec_name: str,
    default_factory: Callable[[], V] | None = None,
    allow_none: bool = False,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., V] | None = None,
    type_error_fmt: str | None = None,
    invalid_spec_error_fmt: str | None = None,
    registry: Mapping[str, str] | None = None,
) -> Any:
    """The component that `spec` is or describes; the others as of `instantiate_from_spec`.

    Args:
        spec: an instance of `expected_type`, a class, a factory, a string, a dict; None for the default.
        default_factory: makes the default.
        allow_none: without one, None is the component.
        type_error_fmt, invalid_spec_error_fmt: messages with the fields expected_type, type_name, actual_type,
            spec_name.

    Raises:
        TypeError: what was made is no `expected_type`.
        ValueError: `spec` describes nothing.
    """
    if isinstance(spec, expected_type):
        return spec
    names = {"spec_name": spec_name, "expected_type": expected_type.__name__, "actual_type": str(type(spec))}
    if spec is None:
        if default_factory is None and not allow_none:
            message = (invalid_spec_error_fmt or "{spec_name} cannot be None.").format(**names)
            raise SpecValueError(message)
        built: Any = None if default_factory is None else default_factory()
        if built is None:
            return None
    elif isinstance(spec, str | Mapping):
        built = instantiate_from_spec(
            spec,
            spec_name=spec_name,
            optional_defaults=optional_defaults,
            dict_requires_type=dict_requires_type,
            dict_default_cls=dict_default_cls,
            registry=registry,
        )
    elif isinstance(spec, type) and issubclass(spec, expected_type):
        built = instantiate_component(spec, {}, optional_defaults)
    elif callable(spec) and not isinstance(spec, type):
        built = spec()
    else:
        raise SpecValueError((invalid_spec_error_fmt or _SPEC_ERROR).format(**names))
    if not isinstance(built, expected_type):
        raise SpecTypeError((type_error_fmt or _TYPE_ERROR).format(type_name=str(type(built)), **names))
    return built
