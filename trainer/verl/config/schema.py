"""Which keys verl's config has, and of which types, read from verl's own files: its YAML defaults and its dataclasses.

verl is not imported for it. That takes seconds, and settles which device it computes on.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl.errors import ConfigError

FREE = ("ray_kwargs.ray_init", "global_profiler.global_tool_config", "transfer_queue.backend")
"""Sections that verl hands on to others as they are."""

WIDER: Mapping[str, tuple[type, ...]] = {
    "trainer.logger": (str, list),
    "trainer.v1.colocate_async.num_warmup_batches": (int, float),
    "trainer.v1.separate_async.num_warmup_batches": (int, float),
    "algorithm.rollout_correction.rollout_is_threshold": (int, float, str),
    "data.gen_batch_size": (int, type(None)),
    "data.train_files": (str, list),
    "data.val_files": (str, list),
}
"""Where verl takes more types than its default shows and no dataclass says so."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,),
    "list": (list,), "tuple": (list,), "dict": (dict,), "None": (type(None),),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Class:
    """One of verl's dataclasses, as written.

    Attributes:
        bases: their names. fields: name -> annotation.
    """

    bases: tuple[str, ...]
    fields: Mapping[str, ast.expr]


@dataclass(frozen=True, slots=True)
class Schema:
    """verl's keys.

    Attributes:
        defaults: verl's whole config as nested dicts, interpolations as their text.
        classes: name -> dataclass, of the packages that the defaults name.
    """

    defaults: Mapping[str, Any]
    classes: Mapping[str, Class] = field(default_factory=dict)

    def check(self, key: str, value: Any) -> None:
        """Raise `ConfigError` unless verl has this key and its value may be of this type."""
        if any(key.startswith(f"{section}.") for section in FREE):
            return
        types = self._types(key)
        if types is None:
            return
        interpolated = isinstance(value, str) and "${" in value
        if interpolated or (isinstance(value, types) and (not isinstance(value, bool) or bool in types)):
            return
        names = " or ".join(dict.fromkeys("null" if t is type(None) else t.__name__ for t in types))
        raise ConfigError(f"{key}={value!r} is of type {type(value).__name__}; verl takes {names}")

    def has(self, key: str) -> bool:
        """Whether verl has this key."""
        try:
            self._types(key)
        except ConfigError:
            return False
        return True

    def default(self, key: str) -> Any:
        """verl's own value, text where it is an interpolation; None where there is none."""
        node: Any = self.defaults
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def _types(self, key: str) -> tuple[type, ...] | None:
        """The types that `key` may be of; None for any.

        Raises:
            ConfigError: verl has no such key.
        """
        if key in WIDER:
            return WIDER[key]
        node: Any = self.defaults
        owner: str | None = None
        *parents, last = key.split(".")
        for depth, part in enumerate(parents):
            annotation = self._annotation(owner, node, part)
            here = node.get(part) if isinstance(node, Mapping) else None
            owner = next((n for n in _names(annotation) if n in self.classes), None)
            if isinstance(here, Mapping) and here:
                if "dict" in _names(annotation) and [*parents, last][depth + 1] not in here:
                    return None
                node = here
            elif owner is not None:
                node = {}
            elif here == {} or {"dict", "Any"} & set(_names(annotation)):
                return None
            else:
                raise self._unknown(key)
        annotation = self._annotation(owner, node, last)
        present = isinstance(node, Mapping) and last in node
        if annotation is None and not present:
            raise self._unknown(key)
        default = node[last] if present else None
        if isinstance(default, Mapping) and default:
            raise ConfigError(
                f"{key} is a section of verl's config and cannot be one value", hint=f"it has {_some(default)}"
            )
        follows = isinstance(default, str) and "${" in default  # another key, and so may come to null
        if annotation is not None:
            names = _names(annotation)
            if "Any" in names or any(n not in _TYPES for n in names):
                return None
            found = tuple(t for n in names for t in _TYPES[n])
            return (*found, type(None)) if default is None or follows else found
        if default is None or follows:
            return None
        return _TYPES.get(type(default).__name__)

    def _annotation(self, owner: str | None, node: Any, name: str) -> ast.expr | None:
        target = node.get("_target_") if isinstance(node, Mapping) else None
        return self._field(target.rpartition(".")[2] if target else owner, name)

    def _field(self, owner: str | None, name: str) -> ast.expr | None:
        known = self.classes.get(owner or "")
        if known is None:
            return None
        if name in known.fields:
            return known.fields[name]
        return next((f for base in known.bases if (f := self._field(base, name)) is not None), None)

    def _unknown(self, key: str) -> ConfigError:
        """The error for a key that verl has not, with the nearest that it has."""
        known = list(_leaves(self.defaults, ""))
        last = key.rpartition(".")[2]
        elsewhere = [k for k in known if k.rpartition(".")[2] == last]
        # The nearest by the whole key, among those of that name or else among all.
        close = difflib.get_close_matches(key, elsewhere or known, n=1, cutoff=0.0 if elsewhere else 0.6)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {_some(self.defaults)}"
        return ConfigError(f"the verl config has no key {key!r}", hint=hint)


def folder() -> Path:
    """Where verl is, found without importing it.

    Raises:
        ConfigError: verl is not installed.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed", hint='pip install "agl[verl]"')
    return Path(spec.submodule_search_locations[0])


def schema(defaults: Mapping[str, Any]) -> Schema:
    """What verl takes where its defaults are these."""
    modules = {t.rpartition(".")[0] for t in _targets(defaults)}
    classes: dict[str, Class] = {}
    for module in sorted(modules):
        classes |= _classes(module)
    return Schema(defaults, classes)


@functools.cache
def _classes(module: str) -> dict[str, Class]:
    """The classes of one of verl's modules, and of the modules beside it if it is a package."""
    place = folder().parent.joinpath(*module.split("."))
    found = {}
    for file in sorted(place.glob("*.py")) or [place.with_suffix(".py")]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else ():
            if isinstance(node, ast.ClassDef):
                fields = {
                    line.target.id: line.annotation
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                }
                found[node.name] = Class(tuple(b.id for b in node.bases if isinstance(b, ast.Name)), fields)
    return found


def _names(annotation: ast.expr | None) -> list[str]:
    """The types that an annotation allows, by name: `Optional[dict[str, int]]` is None and dict."""
    match annotation:
        case None:
            return []
        case ast.Constant(value=None):
            return ["None"]
        case ast.Constant(value=str(text)):
            return _names(ast.parse(text, mode="eval").body)
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(attr=name):
            return [name]
        case ast.BinOp(left=left, right=right):
            return [*_names(left), *_names(right)]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return [*_names(inner), "None"]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=inner)):
            return [n for i in inner for n in _names(i)]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            options = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [type(o.value).__name__ for o in options if isinstance(o, ast.Constant)]
        case ast.Subscript(value=outer):
            return [n.lower() for n in _names(outer)]
    return ["Any"]


def _keys(node: Mapping[str, Any]) -> list[str]:
    return [k for k in node if k != "_target_"]


def _some(node: Mapping[str, Any]) -> str:
    names = _keys(node)
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def _leaves(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, Mapping) and node:
        for name in _keys(node):
            yield from _leaves(node[name], f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from _targets(value)
